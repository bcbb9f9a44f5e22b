"""Makes the names of `bagua.backend` known to `torch.distributed`, without importing torch.

torch 2.14 and newer find `register` by its entry point. Before that a backend has to be registered by whoever uses it:
`import bagua` does so at once if torch is loaded, else when torch is.
"""

from __future__ import annotations

import logging
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

__all__ = ["CODECS", "NAMES", "register", "register_with_torch"]

# Kept here as a list, so that registering imports neither codecs nor torch. `uint8` is short for `minmax_uint8`.
CODECS = ("uint8", "bf16", "eden", "fp16", "identity", "int4", "minmax_uint8", "packed_top_k", "sign", "top_k")
# The form with an underscore is for strings of the form "device:backend", which torch splits at each colon.
NAMES = ("bagua", *(f"bagua{mark}{codec}" for codec in CODECS for mark in ":_"))
DEVICES = ["cpu", "cuda"]
_HOME = "torch.distributed.distributed_c10d"


def register() -> None:
    """Register all `NAMES` as backends of `torch.distributed`. Repeating it has no effect.

    Raises:
        ImportError: torch was built without `torch.distributed`.
    """
    import torch.distributed as dist

    _register(dist.Backend)


def register_with_torch() -> None:
    """Register now if torch is loaded, else as soon as it is."""
    module = sys.modules.get(_HOME)
    if module is None:
        if not any(isinstance(finder, _WhenLoaded) for finder in sys.meta_path):
            sys.meta_path.insert(0, _WhenLoaded())
    elif hasattr(module, "Backend"):
        _register_quietly(module)


def _register(backend: Any) -> None:
    for name in NAMES:
        if name not in backend.backend_list:
            backend.register_backend(name, _creator(name), extended_api=True, devices=DEVICES)


def _creator(name: str) -> Any:
    def create(options: Any, pg_options: Any = None) -> Any:
        from bagua.backend.process_group import create_process_group

        return create_process_group(name, options, pg_options)

    return create


def _register_quietly(module: ModuleType) -> None:
    try:
        _register(module.Backend)
    except Exception:  # `import torch` must not fail for it
        logging.getLogger("bagua").warning("torch does not take the backend 'bagua'", exc_info=True)


class _WhenLoaded(MetaPathFinder):
    """Leaves itself out at the first import of torch's registry of backends, and registers once it is loaded."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the spec that other finders return; its loader tells us when it is done."""
        if fullname != _HOME:
            return None
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                del loader.exec_module
                load(module)
                _register_quietly(module)

            loader.exec_module = exec_module  # of this one object, which loads nothing else
        return spec

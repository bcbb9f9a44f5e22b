"""On each rank: run a script of the original with its device changed."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from benchmarks.original.device import to_cpu


def import_torchvision() -> None:
    """Import torchvision, also one whose operators were built for another torch: the examples use none of them."""
    try:
        import torchvision  # pyright: ignore[reportMissingImports, reportUnusedImport]
    except ImportError:
        return
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        name = "torchvision._meta_registrations"  # the shapes of what those operators return
        sys.modules[name] = ModuleType(name)
        import torchvision  # pyright: ignore[reportMissingImports]  # noqa: F401


def reduce_as_nccl() -> None:
    """Have `torch.distributed.reduce` leave the tensors of other ranks than `dst` as they are, as with NCCL.

    With gloo it leaves partial sums there, and an example compares them with what Bagua leaves.
    """
    reduce = dist.reduce

    def keeping(tensor: Any, dst: int, *args: Any, **kwargs: Any) -> Any:
        kept = tensor.clone()
        reduce(tensor, dst, *args, **kwargs)
        if dist.get_rank() != dst:
            tensor.copy_(kept)

    dist.reduce = keeping


def main() -> None:
    """Run the script that the first argument names; the others are its own."""
    path = Path(sys.argv[1])
    import_torchvision()
    reduce_as_nccl()
    source, _ = to_cpu(path.read_text())
    sys.argv = sys.argv[1:]
    sys.path[0] = str(path.parent)
    module = ModuleType("__main__")
    module.__file__ = str(path)
    sys.modules["__main__"] = module  # what the script pickles is found by this name
    exec(compile(source, str(path), "exec"), module.__dict__)


if __name__ == "__main__":
    main()

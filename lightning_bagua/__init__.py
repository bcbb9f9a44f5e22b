"""Bagua as a strategy of Lightning 2.x, under both of its names, `lightning` and `pytorch_lightning`.

    import lightning_bagua  # makes the name "bagua" known
    Trainer(strategy="bagua", devices=2)

    from lightning_bagua import BaguaStrategy
    Trainer(strategy=BaguaStrategy(algorithm="bytegrad"), devices=2)

    from lightning_bagua import BaguaFabricStrategy
    Fabric(strategy=BaguaFabricStrategy(algorithm="bytegrad"), devices=2)

The two packages have classes of their own. Whichever is imported already is served; if neither is, all that are
installed. `BaguaStrategy` is that for `lightning` where both are; the other is
`lightning_bagua.for_pytorch_lightning.BaguaStrategy`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_bagua.for_lightning import BaguaFabricStrategy, BaguaStrategy

__all__ = ["BaguaFabricStrategy", "BaguaStrategy", "register"]

_PACKAGES = ("lightning", "pytorch_lightning")


def register() -> type[Any]:
    """Make `Trainer(strategy="bagua")` and `Fabric(strategy="bagua")` known; importing this package does it.

    Call again after importing the other package.

    Returns:
        The strategy's class, of the first package that is served.

    Raises:
        ImportError: neither package is installed, or it is older than 2.0.
    """
    served = [name for name in _PACKAGES if name in sys.modules] or [name for name in _PACKAGES if find_spec(name)]
    if not served:
        raise ImportError("lightning_bagua needs lightning or pytorch_lightning 2.x: pip install 'bagua[lightning]'")
    classes: list[type[Any]] = []
    for name in served:
        version = str(import_module(name).__version__)
        if int(version.split(".")[0]) < 2:
            raise ImportError(f"lightning_bagua needs {name} 2.0 or newer, found {version}")
        module = import_module(f"lightning_bagua.for_{name}")
        module.BaguaStrategy.register_strategies(module.StrategyRegistry)
        module.BaguaFabricStrategy.register_strategies(module.FABRIC_REGISTRY)
        classes.append(module.BaguaStrategy)
    return classes[0]


if not TYPE_CHECKING:
    BaguaStrategy = register()
    BaguaFabricStrategy = sys.modules[BaguaStrategy.__module__].BaguaFabricStrategy

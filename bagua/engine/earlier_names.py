"""Deprecated names of functions, kept as aliases."""

from __future__ import annotations

from torch import nn

from bagua.engine import distributed_module

__all__ = ["abort", "average"]


def abort(module: nn.Module) -> None:
    """Deprecated name of `pause`. It stays, and gives no warning.

    Args:
        module: given to `distribute`.
    """
    distributed_module.pause(module)


def average(module: nn.Module) -> None:
    """Deprecated name of `average_parameters`. It stays, and gives no warning.

    Args:
        module: given to `distribute`.
    """
    distributed_module.average_parameters(module)

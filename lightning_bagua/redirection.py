"""Calls of a method of a module that count as its forward pass."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["call_through_hooks"]


def call_through_hooks(module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Return `module.method(*args, **kwargs)`, with the module's forward hooks run around it.

    The method may call the module itself, whose `forward` it finds as it was.
    """
    had_own = "forward" in vars(module)
    own = vars(module).get("forward")

    def restore() -> None:
        if had_own:
            vars(module)["forward"] = own
        else:
            vars(module).pop("forward", None)

    def redirected(*inputs: Any, **named: Any) -> Any:
        restore()
        return getattr(module, method)(*inputs, **named)

    vars(module)["forward"] = redirected
    try:
        return module(*args, **kwargs)
    finally:
        restore()

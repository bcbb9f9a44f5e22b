"""Leave inference mode: tensors made inside it cannot be modified outside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

__all__ = ["outside_inference"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def outside_inference(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorator that leaves inference mode while the function runs; gradients stay off."""

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call

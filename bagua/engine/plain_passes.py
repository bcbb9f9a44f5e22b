"""Tell forward passes that a backward pass into `.grad` can follow from those of transforms and tracers."""

from __future__ import annotations

import torch

__all__ = ["is_plain_pass"]

_TRACERS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)


def is_plain_pass() -> bool:
    """Whether a forward pass now is an ordinary one: its tensors hold numbers and can be used after it.

    Not in inference mode, nor within transforms of `torch.func`, with fake tensors, or where `make_fx` or
    `torch.jit.trace` traces. What is made there cannot leave it: tensors without storage, or parts of a graph. And it
    may run on one rank alone.
    """
    if torch.is_inference_mode_enabled() or torch.jit.is_tracing():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return False
    return all(torch._C._get_dispatch_mode(key) is None for key in _TRACERS)

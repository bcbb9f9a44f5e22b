"""What kind of backward pass is running."""

from __future__ import annotations

import sys

import torch

__all__ = ["accumulates", "refuse_capture", "refuse_compiled_autograd"]


def accumulates() -> bool:
    """Whether the pass that runs adds to `.grad`, as `backward()` does, and not `torch.autograd.grad`.

    To be called from a tensor's hook. Some leaf below the hook's node tells; if there is none, it is taken for one
    that does.
    """
    stack = [torch._C._current_autograd_node()]
    seen = set()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):  # it accumulates into a leaf
            try:
                return torch._C._will_engine_execute_node(node)
            except RuntimeError:  # the leaf's gradient is to be returned
                return False
        stack += [following for following, _ in node.next_functions]
    return True


def refuse_capture(device: torch.device) -> None:
    """Refuse to be captured in a CUDA graph: a replay would run neither hooks nor exchanges.

    Raises:
        RuntimeError: the current stream is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "CUDA graphs: the forward and backward pass of a distributed module cannot be captured, because a replay "
            "would exchange nothing; capture parts of the module before bagua.distribute(), or train without "
            "CUDA graphs"
        )


def refuse_compiled_autograd() -> None:
    """Refuse a backward pass that compiled autograd runs: Dynamo traces its hooks, and none can learn of its end.

    To be called from a tensor's hook.

    Raises:
        RuntimeError: it does.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and compiled.in_compiled_autograd_region:
        raise RuntimeError(
            "compiled autograd: it cannot run the backward pass of a distributed module, because gradients are "
            "exchanged by hooks that it would compile; leave torch._dynamo.config.compiled_autograd off; torch.compile "
            "of the module compiles the backward pass without it"
        )

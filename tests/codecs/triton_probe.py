"""Whether Triton's interpreter works with this numpy: that of Triton 3.6 (torch 2.11) fails in loops with numpy 2.4."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError


@triton.jit
def _count(out, n):
    total = 0
    for _ in range(n):
        total += 1
    tl.store(out, total)


@functools.cache
def interpreter_works() -> bool:
    """Run a loop whose length is an argument. Needs TRITON_INTERPRET=1."""
    out = torch.zeros(1, dtype=torch.int32)
    try:
        _count[(1,)](out, 3)
    except InterpreterError:
        return False
    return out.item() == 3

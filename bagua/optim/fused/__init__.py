"""`fuse`: run an element-wise optimizer on a few flat tensors instead of thousands of small ones.

fuse.py     puts a stepper on an optimizer
proof.py    tries on small copies whether the optimizer acts element by element
stepper.py  one step: lay out, gather, let the optimizer's own step run on flat parameters, keep its state
layout.py   which parameters go side by side
arena.py    parameters side by side in one flat tensor, cut into what the optimizer sees
slots.py    what an optimizer keeps for a parameter
state.py    `optimizer.state`, always as the unfused optimizer would show it
"""

from __future__ import annotations

from bagua.optim.fused.fuse import fuse, is_fused
from bagua.optim.fused.proof import NotElementwiseError

__all__ = ["NotElementwiseError", "fuse", "is_fused"]

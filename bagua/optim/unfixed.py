"""The way from an optimizer whose second moment was fixed to Adam, which goes on updating it."""

from __future__ import annotations

import torch

from bagua.optim.two_stage import TwoStage

__all__ = ["unfix_second_moments"]


@torch.no_grad()
def unfix_second_moments(optimizer: torch.optim.Optimizer) -> int:
    """Let an Adam go on from a state that `QAdam`, `ZeroOneAdam` or `OneBitLamb` has saved.

    They update the second moment v at n of k steps only, and divide it by 1 - b2^n. Adam divides it by 1 - b2^k, so
    with n = 100 of k = 3000 its steps would be 3 times too large for some 1 / (1 - b2) steps. v is multiplied by
    (1 - b2^k) / (1 - b2^n), once. `bagua.distribute` does so by itself.

    Args:
        optimizer: after its `load_state_dict`. One of the three is left as it is.

    Returns:
        The number of parameters whose second moment was scaled.

    Raises:
        TypeError: it is no optimizer.

    Examples:
        >>> before = bagua.optim.QAdam(model.parameters(), lr=0.01)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        >>> optimizer.load_state_dict(before.state_dict())
        >>> bagua.optim.unfix_second_moments(optimizer)
        0
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, TwoStage):
        return 0
    scaled = 0
    for group in optimizer.param_groups:
        for slot in (optimizer.state.get(param) for param in group["params"]):
            if not slot or "num_updates" not in slot:
                continue
            updates, steps = int(slot.pop("num_updates")), int(slot.get("step", 0))
            if "betas" not in group or "exp_avg_sq" not in slot or not 0 < updates < steps:
                continue
            beta2 = float(group["betas"][1])
            second = slot["exp_avg_sq"]
            second.mul_((1 - beta2**steps) / (1 - beta2**updates))
            second.masked_fill_(second.isinf(), 0)  # elements that never had a gradient, and may have one now
            scaled += 1
    return scaled

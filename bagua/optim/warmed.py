"""Warm-up of two-stage optimizers: a number of steps, or until the second moment is stable."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from bagua.optim.checks import check_steps
from bagua.optim.two_stage import TwoStage

__all__ = ["AUTO", "WarmedUp"]

AUTO = "auto"
STABLE = 0.96  # least ratio of the smaller to the larger norm
_TESTS = 16  # in one window, at most


class WarmedUp(TwoStage):
    """Two-stage optimizer whose second moment v is learned for `warmup_steps` steps and then fixed, if it is.

    With `warmup_steps="auto"` the warm-up ends when v is stable. With n_t the sum of the elements of v / (1 - b2^t)
    over all parameters, and D = 1 / (1 - b2) steps, rounded up to a multiple of the distance between two tests:

        min(n_t, n_(t - D)) / max(n_t, n_(t - D)) >= 0.96,   and the learning rate is not above that of the test before

    It is tested some 16 times in D steps. If a test holds after step t, v is fixed from step t + 1 on. Mean gradients
    and hence v are the same on all ranks, so they decide alike; the algorithm makes sure that they do, see
    `awaits_verdict`. The tests are part of the state dict. Runs of less than D steps never end the warm-up.

    Source: arXiv:2102.02888 (1-bit Adam): n_t / n_(t - D) >= 0.96, after the warm-up of the learning rate.
    Differs: n_t is corrected for v's start at 0, and a v that grows is not stable either.
    """

    common: ClassVar[tuple[str, ...]] = ("warmup_steps",)
    _rejected: int | None = None  # the step whose test does not hold on all ranks

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, {**defaults, "warmup_end": None, "variance_tests": ()})

    def check_options(self, options: dict[str, Any]) -> None:
        """Check the options of a parameter group."""
        super().check_options(options)
        steps = options["warmup_steps"]
        if isinstance(steps, str):
            if steps != AUTO:
                raise ValueError(f'warmup_steps: expected a number of steps or "auto", got {steps!r}')
        else:  # at least one: without it there is no second moment
            check_steps("warmup_steps", steps)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters; a warm-up that is over is as long for them."""
        if self.param_groups:
            param_group = {"warmup_end": self.param_groups[0]["warmup_end"], **param_group}
        super().add_param_group(param_group)

    @property
    def warmup_steps(self) -> int | str:
        """The option: steps of the warm-up, or "auto"."""
        return self.param_groups[0]["warmup_steps"]

    @property
    def warmup_end(self) -> int | None:
        """Steps of the warm-up; None while they are not known."""
        return end_of(self.param_groups[0])

    @property
    def compressing(self) -> bool:
        """Whether the warm-up is over."""
        end = self.warmup_end
        return end is not None and self.num_steps >= end

    def fixed(self, params: Collection[Tensor]) -> list[Tensor]:
        """Those whose own warm-up is over."""
        if not self.compressing:
            return []
        return [param for param in params if self._is_over(self.state.get(param, {}), self._group(param))]

    def _is_over(self, slot: Mapping[str, Any], group: dict[str, Any]) -> bool:
        end = end_of(group)
        return end is not None and "exp_avg_sq" in slot and slot["step"] >= end

    @property
    def variance_ratio(self) -> float | None:
        """Ratio of the smaller to the larger norm of v in the last test; None without a test a window before it."""
        tests = self.param_groups[0]["variance_tests"]
        if not tests:
            return None
        step, norm, _ = tests[-1]
        before = [other for at, other, _ in tests if at <= step - self.window]
        if not before or not norm or not before[-1]:
            return None
        return min(norm, before[-1]) / max(norm, before[-1])

    @property
    def window(self) -> int:
        """Steps between the two norms that are compared."""
        between = self._between_tests
        return between * -(-_time_constant(self.param_groups) // between)

    @property
    def _between_tests(self) -> int:
        return -(-_time_constant(self.param_groups) // _TESTS)

    @property
    def stable(self) -> bool:
        """Whether the last test holds."""
        tests, ratio = self.param_groups[0]["variance_tests"], self.variance_ratio
        return ratio is not None and ratio >= STABLE and tests[-1][2] <= tests[-2][2]

    @property
    def awaits_verdict(self) -> bool:
        """Whether a test was made in the last step, so that the next step may end the warm-up.

        Until then the ranks must agree: `reject_test` where `stable` is not the case on all of them.
        """
        tests = self.param_groups[0]["variance_tests"]
        return self.warmup_end is None and bool(tests) and tests[-1][0] == self.num_steps

    def reject_test(self) -> None:
        """Let the warm-up go on, although the last test may hold: on another rank it does not."""
        self._rejected = self.num_steps

    def begin_step(self) -> None:
        """End the warm-up if the last step's test held; not in a step without gradients, which may be a lost one."""
        if self.awaits_verdict and self.stable and self._rejected != self.num_steps and self._has_gradients():
            for group in self.param_groups:
                group["warmup_end"], group["variance_tests"] = self.num_steps, ()

    def end_step(self) -> None:
        """Test v, if the warm-up's end is not known and a test is due."""
        step = self.num_steps
        if self.warmup_end is not None or not step or step % self._between_tests or self.awaits_verdict:
            return
        rate = sum(float(group["lr"]) for group in self.param_groups)
        tests = [test for test in self.param_groups[0]["variance_tests"] if test[0] >= step - 2 * self.window]
        self.param_groups[0]["variance_tests"] = (*tests, (step, self._norm(), rate))

    def _has_gradients(self) -> bool:
        return any(param.grad is not None for group in self.param_groups for param in group["params"])

    def _norm(self) -> float:
        """Sum of the elements of all v, each corrected for its start at 0."""
        sums: list[torch.Tensor] = []
        for group in self.param_groups:
            for slot in (self.state[param] for param in group["params"] if param in self.state):
                if slot.get("num_updates"):
                    correction = 1 - group["betas"][1] ** slot["num_updates"]
                    sums.append(slot["exp_avg_sq"].sum(dtype=torch.float64) / correction)
        return float(torch.stack([each.to(sums[0].device) for each in sums]).sum()) if sums else 0.0


def end_of(group: dict[str, Any]) -> int | None:
    """Steps of the warm-up of a group, None while they are not known."""
    return group["warmup_end"] if group["warmup_steps"] == AUTO else group["warmup_steps"]


def warming(group: dict[str, Any], slot: dict[str, Any]) -> bool:
    """Whether the step of a parameter that is being made, counted already, is one of its warm-up."""
    end = end_of(group)
    return end is None or slot["step"] <= end


def _time_constant(groups: list[dict[str, Any]]) -> int:
    """1 / (1 - b2), of the group with the longest, in whole steps."""
    return max(1, *(round(1 / (1 - group["betas"][1])) for group in groups))

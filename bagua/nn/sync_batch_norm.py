"""Batch normalisation over the batch of all ranks, on CPU and CUDA tensors.

Legend: B = rows on this rank, C = channels, R = ranks, n = elements of a channel.
"""

from __future__ import annotations

import weakref
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from bagua.comm.collectives import all_gather_rows, all_reduce_
from bagua.comm.groups import Group
from bagua.comm.team import Team

__all__ = ["SyncBatchNorm"]

_M = TypeVar("_M", bound=nn.Module)
# One group for all layers of a process group and device, of their own: nobody else's collectives come in between.
_groups: weakref.WeakKeyDictionary[Any, dict[str, Group]] = weakref.WeakKeyDictionary()


class SyncBatchNorm(nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that works on CPU tensors too, where torch refuses.

    Mean, variance, running statistics and the gradient of the input are those of all ranks' batches joined to one;
    batches may differ in size, and one may be empty. Gradients of weight and bias are this rank's part; their sum
    over the ranks is that of the joined batch, so their mean (what `gradient_allreduce` makes) is that of the mean
    of the ranks' losses.

    In training mode each forward and each backward pass is collective. The group is opened in the first forward pass.

    Args:
        process_group: whose batches are joined; None is the default group.

    Bytes: (R-1) (2 C + 1) * 8 in the forward pass, 2 (R-1)/R * 2 C * 8 in the backward pass.

    Examples:
        >>> layer = bagua.nn.SyncBatchNorm(10)
        >>> layer(torch.randn(4, 10)).shape
        torch.Size([4, 10])
    """

    _untraced: ClassVar[Any] = None

    def __init__(self, *args: Any, **kw: Any) -> None:
        super().__init__(*args, **kw)
        if SyncBatchNorm._untraced is None:
            # Collectives of groups of our own cannot be traced. Not as a decorator: that imports the compiler.
            SyncBatchNorm._untraced = staticmethod(torch.compiler.disable(_synchronise))

    def forward(self, input: Tensor) -> Tensor:
        """Normalise `input`: [B, C, ...], of the same shape after C on all ranks."""
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        tracked = not self.training or self.track_running_stats
        mean, var = (self.running_mean, self.running_var) if tracked else (None, None)
        if not self.training:
            return F.batch_norm(input, mean, var, self.weight, self.bias, mean is None, factor, self.eps)
        run = SyncBatchNorm._untraced or _synchronise
        return run(input, self.weight, self.bias, mean, var, self.eps, factor, self.process_group)

    @classmethod
    def convert(cls, module: _M, process_group: Any = None) -> _M:
        """Replace every batch norm in `module`, torch's synchronised one included; parameters stay the same objects.

        Returns:
            `module`, or its replacement if it is a batch norm itself.
        """
        made: Any = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            made = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_group,
            )
            if module.affine:
                made.weight, made.bias = module.weight, module.bias
            made.running_mean, made.running_var = module.running_mean, module.running_var
            made.num_batches_tracked = module.num_batches_tracked
            made.training = module.training
        for name, child in module.named_children():
            made.add_module(name, cls.convert(child, process_group))
        return made

    @classmethod
    def convert_sync_batchnorm(cls, module: _M, process_group: Any = None) -> _M:
        """`convert` by torch's name."""
        return cls.convert(module, process_group)


def _group(process_group: Any, device: torch.device) -> Group:
    team = Team.of(process_group, device)
    opened = _groups.setdefault(team.counters, {})
    if device.type not in opened:
        opened[device.type] = team.open(f"lane/{team.next_lane()}").world
    return opened[device.type]


def _synchronise(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    eps: float,
    factor: float,
    process_group: Any,
) -> Tensor:
    group = _group(process_group, x.device)
    if group.size == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, factor, eps)
    mean_C, var_C, n = _joint_moments(x.detach(), group)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean_C.to(running_mean), factor)
        running_var.lerp_((var_C * (n / max(n - 1.0, 1.0))).to(running_var), factor)
    result: Any = _Normalise.apply(x, weight, bias, mean_C, (var_C + eps).rsqrt(), n, group)
    return result


@torch.no_grad()
def _joint_moments(x: Tensor, group: Group) -> tuple[Tensor, Tensor, float]:
    """Mean and biased variance of each channel over all ranks, both fp64 [C], and n.

    Means and squared deviations are joined as they are; sums of squares would cancel.
    """
    channels, n = x.shape[1], x.numel() // max(x.shape[1], 1)
    rows = torch.zeros(group.size, 2 * channels + 1, dtype=torch.float64, device=x.device)
    mine = rows[group.rank]
    if n:
        var_C, mean_C = torch.var_mean(_wide(x), _others(x), correction=0)
        mine[:channels], mine[channels : 2 * channels] = mean_C, var_C.double() * n
    mine[-1] = n
    all_gather_rows(group, rows)
    mean_RC, deviation_RC, n_R1 = rows[:, :channels], rows[:, channels : 2 * channels], rows[:, -1:]
    total = float(n_R1.sum())
    if total < 2:
        raise ValueError(f"SyncBatchNorm: expected more than 1 value per channel among all ranks, got {total:g}")
    mean_C = (mean_RC * n_R1).sum(0) / total
    var_C = (deviation_RC + n_R1 * (mean_RC - mean_C).square()).sum(0) / total
    return mean_C, var_C, total


class _Normalise(torch.autograd.Function):
    """y = (x - mean) * scale * weight + bias, with moments that depend on the x of all ranks."""

    @staticmethod
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean_C: Tensor,
        scale_C: Tensor,
        n: float,
        group: Group,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean_C, scale_C)
        ctx.n, ctx.group = n, group
        y = (_wide(x) - _along(mean_C, x)) * _along(scale_C, x)
        if weight is not None:
            y = y * _along(weight, x)
        if bias is not None:
            y = y + _along(bias, x)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, mean_C, scale_C = ctx.saved_tensors
        wide, centred = _wide(dy), _wide(x) - _along(mean_C, x)
        sums_2C = torch.stack([wide.sum(_others(x)), (wide * centred).sum(_others(x))]).double()
        dx = dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = (sums_2C[1] * scale_C).to(weight.dtype)
        if ctx.needs_input_grad[2]:
            dbias = sums_2C[0].to(dy.dtype if weight is None else weight.dtype)
        if ctx.needs_input_grad[0]:
            means_2C = all_reduce_(ctx.group, sums_2C.clone()) / ctx.n
            dx = wide - _along(means_2C[0], x) - centred * _along(means_2C[1] * scale_C.square(), x)
            dx = dx * _along(scale_C if weight is None else scale_C * weight, x)
            dx = dx.to(x.dtype)
        return dx, dweight, dbias, None, None, None, None


def _others(x: Tensor) -> list[int]:
    """All dimensions but the channels'."""
    return [dim for dim in range(x.ndim) if dim != 1]


def _along(values_C: Tensor, x: Tensor) -> Tensor:
    """Values of channels in the shape and precision of calculations with `x`."""
    return values_C.to(_wide_dtype(x)).view(1, -1, *[1] * (x.ndim - 2))


def _wide(x: Tensor) -> Tensor:
    return x.to(_wide_dtype(x))


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32

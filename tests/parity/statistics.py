"""Rows: buffers and batch statistics."""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from tests.parity.case import FEW, Case
from tests.parity.feature import Refused, feature, says
from tests.parity.model import STEPS, Small, batch, loss_of, same_everywhere, target, train, weights

SECTION = "Buffers and batch statistics"


class Normed(nn.Module):
    """A batch norm in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


@feature(
    SECTION,
    "buffers broadcast as by DDP: before each forward pass but those after one in `no_sync` (`broadcast_buffers=True`)",
    refused={"async": "broadcast_buffers: 'async' does not synchronise the ranks"},
)
def buffers_broadcast(case: Case) -> None:
    """All ranks begin a pass with rank 0's; not after one within no_sync, nor in evaluation mode."""
    try:
        model, optimizer = case.build(Normed, broadcast_buffers=True)
    except ValueError as error:
        raise Refused(str(error)) from None
    assert isinstance(model, Normed)
    begun: list[dict[str, Tensor]] = []
    handle = model.first.register_forward_pre_hook(
        lambda *_: begun.append({name: buffer.clone() for name, buffer in model.named_buffers()})
    )
    train(model, optimizer, range(3))
    assert not same_everywhere(dict(model.named_buffers())), "the ranks' own batches came in afterwards"
    for buffers in begun:
        assert same_everywhere(buffers)
    with bagua.no_sync(model):
        loss_of(model, 3).backward()
        assert same_everywhere(begun[-1]), "the pass before was synchronised"
        loss_of(model, 4).backward()
    model.eval()
    model(batch(0))
    assert not same_everywhere(begun[-1]) and not same_everywhere(begun[-2])
    model.train()
    loss_of(model, 5).backward()
    assert not same_everywhere(begun[-1])
    model.norm.running_mean = torch.full_like(model.norm.running_mean, dist.get_rank() + 5.0)  # another object now
    train(model, optimizer, [4])
    assert torch.equal(begun[-1]["norm.running_mean"], torch.full((5,), 5.0))
    handle.remove()
    case.check_agreement(model)


@feature(SECTION, "each rank's own buffers (the default), equal at the start", daily=FEW)
def own_buffers(case: Case) -> None:
    """Nothing is sent for them while training."""
    torch.manual_seed(dist.get_rank())
    model = Normed()
    with torch.no_grad():
        model.norm.running_mean.fill_(dist.get_rank() + 5.0)
    optimizer = case.optimizer(model.parameters())
    case.distribute(model, optimizer)
    assert float(model.norm.running_mean[0]) == 5.0
    train(model, optimizer)
    assert not same_everywhere(dict(model.named_buffers()))
    case.check_agreement(model)


@feature(SECTION, "`bagua.nn.SyncBatchNorm`: statistics of one big batch")
def sync_batch_norm(case: Case) -> None:
    """The first pass is compared with the joined batch; then it is trained with."""
    torch.manual_seed(0)
    model = bagua.nn.SyncBatchNorm.convert(Normed())
    optimizer = case.optimizer(model.parameters())
    case.distribute(model, optimizer)
    torch.manual_seed(0)
    whole = Normed()
    both = torch.cat([batch(0, rank) for rank in range(2)])
    want = whole(both)
    (want - torch.cat([target(0, rank) for rank in range(2)])).square().mean().backward()
    out = model(batch(0))
    assert torch.allclose(out, want[4 * dist.get_rank() :][:4], atol=1e-5)
    (out - target(0)).square().mean().backward()
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        assert torch.allclose(getattr(model.norm, name), getattr(whole.norm, name), atol=1e-6), name
    if case.name == "gradient_allreduce":
        for (name, param), other in zip(model.named_parameters(), whole.parameters(), strict=True):
            assert torch.allclose(param.grad, other.grad, atol=1e-6), name
    optimizer.step()
    train(model, optimizer, range(1, STEPS))
    assert same_everywhere(dict(model.named_buffers()))
    case.check_agreement(model)


@feature(
    SECTION,
    "`module.to()`, `.half()` and the like after `distribute`: an error, until `distribute` is called again",
    daily=FEW,
)
def moved(case: Case) -> None:
    """Instead of training on with what is no longer exchanged."""
    for steps_before in (0, 2):
        model, optimizer = case.build(Small)
        train(model, optimizer, range(steps_before))
        model.to("cpu").float()  # changes nothing, so nothing is wrong
        train(model, optimizer, [steps_before])
        model.double()
        forward = partial(model, batch(0).double())
        says(RuntimeError, "was converted, moved", "call bagua.distribute() again", run=forward)
        model.float()
        case.distribute(model, optimizer)
        train(model, optimizer, range(3, 6))
        case.check_agreement(model)
        bagua.detach(model)
        assert weights(model)

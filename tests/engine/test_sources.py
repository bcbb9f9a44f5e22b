"""Gradients that exchanges read where autograd left them give the bits of gradients that were copied before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms.base import Algorithm, Context, Payload
from bagua.algorithms.base import Bucket as BucketView
from bagua.comm.team import Team
from bagua.engine.reducer import bucket as bucket_module
from bagua.engine.reducer.bucket import Bucket
from bagua.exchanges import AllReduce, Exchange
from bagua.exchanges import payload_source as source_module
from tests.daily import one_in
from tests.rank_threads import run_teams

SGD = [
    ("gradient_allreduce", {}),
    ("gradient_allreduce", {"codec": "bf16"}),
    ("bytegrad", {}),
    ("bytegrad", {"codec": "int4"}),
    ("bytegrad", {"codec": "top_k"}),
    ("power_sgd", {}),
]


class Net(nn.Module):
    """Two layouts of weights, a bias that is used twice, and one that is not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3)
        self.conv.weight = nn.Parameter(self.conv.weight.detach().to(memory_format=torch.channels_last))
        self.hidden, self.spare, self.last = nn.Linear(32, 40), nn.Linear(32, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor, spare: bool) -> Tensor:
        x = self.conv(x).flatten(1)
        x = self.hidden(x) + self.hidden.bias
        return self.last(x + self.spare.weight.mean() if spare else x)


def drive(team: Team, algorithm: str, options: dict[str, Any], make: Callable[[Any], Any], accumulate: bool) -> Any:
    net = Net()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.randn(param.shape, generator=generator) * 0.1)
    optimizer = make(net.parameters())
    bagua.distribute(net, optimizer, algorithm, process_group=team, bucket_bytes=4000, **options)
    data = torch.Generator().manual_seed(2 + team.rank)
    for step in range(7):
        optimizer.zero_grad()
        if accumulate:
            with bagua.no_sync(net):
                net(torch.randn(2, 2, 4, 4, generator=data), False).square().mean().backward()
        net(torch.randn(2, 2, 4, 4, generator=data), step % 3 != 1).square().mean().backward()
        optimizer.step()
    found = [value.detach().clone() for param in net.parameters() for value in (param, param.grad) if value is not None]
    return [*found, *(slot["exp_avg"] for slot in optimizer.state.values() if "exp_avg" in slot)]


def compare(monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    results, taken = [], []
    take = Bucket.take

    def counted(self: Bucket, hook: Any) -> Any:
        source = take(self, hook)
        taken.append(source is not None)
        return source

    monkeypatch.setattr(Bucket, "take", counted)
    for least, cached in ((1 << 40, 1 << 16), (1, 1 << 16), (1, 100)):
        monkeypatch.setattr(bucket_module, "_LEAST_PIECE", least)
        monkeypatch.setattr(source_module, "_CACHED", cached)
        taken.clear()
        results.append(run_teams(2, drive, *args))
        assert any(taken) == (least == 1 and bool(taken)), taken
    assert len(results[0][0]) > 8
    assert all(value.isfinite().all() for value in results[0][0])
    for other in results[1:]:
        for rank in range(2):
            for ours, theirs in zip(other[rank], results[0][rank], strict=True):
                assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("algorithm", "options", "accumulate"), one_in(2, [pytest.param(*each) for each in SGD], [False, True]), ids=str
)
def test_with_sgd(algorithm: str, options: dict[str, Any], accumulate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(monkeypatch, algorithm, options, lambda params: torch.optim.SGD(params, 0.003), accumulate)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("codec", ["minmax_uint8", "sign"])
def test_with_momenta(codec: str, weight_decay: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        return bagua.optim.QAdam(params, 0.01, warmup_steps=2, weight_decay=weight_decay)

    compare(monkeypatch, "qadam", {"codec": codec}, make, False)


@pytest.mark.parametrize("algorithm", ["one_bit_lamb", "zero_one_adam"])
def test_with_other_momenta(algorithm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        if algorithm == "one_bit_lamb":
            return bagua.optim.OneBitLamb(params, 0.01, warmup_steps=2)
        return bagua.optim.ZeroOneAdam(params, 0.01)

    compare(monkeypatch, algorithm, {}, make, False)


REFUSED = "launch: with hook, pass before and after too; exchanges that cannot use the hook call those"


class Incomplete(Algorithm):
    """Says what to do on the way, and nothing for exchanges that cannot do it there."""

    name = "incomplete"

    @property
    def exchange(self) -> Exchange:  # pyright: ignore[reportIncompatibleVariableOverride]
        return AllReduce()

    def on_ready(self, ctx: Context, bucket: BucketView) -> None:
        ctx.launch(self.exchange, bucket, before=lambda: None, hook=Halves())


class Halves:
    def enter(self, index: int, lo: int, hi: int, x: Tensor, out: Tensor) -> Tensor:
        return torch.mul(x, 0.5, out=out)

    def leave(self, index: int, lo: int, hi: int, x: Tensor) -> None:
        pass


class OldKeyword(Incomplete):
    """Uses the old name of `hook`."""

    name = "old_keyword"

    def on_ready(self, ctx: Context, bucket: BucketView) -> None:
        with pytest.raises(ValueError, match="passage is the old name of hook"):
            ctx.launch(self.exchange, bucket, hook=Halves(), passage=Halves())
        with pytest.warns(FutureWarning, match="passage is called hook now"):
            ctx.launch(self.exchange, bucket, before=lambda: None, passage=Halves())


def train_incomplete(team: Team, algorithm: type[Algorithm]) -> str:
    net = nn.Linear(4, 4)
    bagua.distribute(net, torch.optim.SGD(net.parameters(), 0.1), algorithm(), process_group=team)
    try:
        net(torch.ones(1, 4)).sum().backward()
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_hook_alone_is_refused() -> None:
    assert run_teams(2, train_incomplete, Incomplete) == [REFUSED] * 2


def test_the_old_keyword_is_the_hook() -> None:
    assert run_teams(1, train_incomplete, OldKeyword) == [REFUSED]


def bucket_of(*params: nn.Parameter) -> Bucket:
    return Bucket(0, [f"p{index}" for index in range(len(params))], params, Payload.GRAD)


def test_flat_brings_what_was_left_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_LEAST_PIECE", 1)
    a, b = nn.Parameter(torch.zeros(4, 3)), nn.Parameter(torch.zeros(5))
    bucket = bucket_of(a, b)
    a.grad, b.grad = torch.full((4, 3), 2.0), bucket.views[1]
    bucket.views[1].fill_(3.0)
    bucket.gather()
    assert a.grad is not bucket.views[0], "its values are not there yet"
    assert bucket.flat.tolist() == [2.0] * 12 + [3.0] * 5
    assert a.grad is bucket.views[0]
    assert bucket.take(None) is None, "nothing is left elsewhere"


def test_gradients_of_another_layout_or_type_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_LEAST_PIECE", 1)
    a, b, c = (nn.Parameter(torch.zeros(4, 3)) for _ in range(3))
    bucket = bucket_of(a, b, c)
    grads = [torch.randn(3, 4).t(), torch.randn(4, 3), torch.randn(4, 3).to_sparse()]
    a.grad, b.grad, c.grad = grads
    bucket.gather()
    source = bucket.take(None)
    assert source is not None
    assert all(param.grad is view for param, view in zip(bucket.params, bucket.views, strict=True))
    source.fill(0, 36)
    want = torch.cat([grads[0].flatten(), grads[1].flatten(), grads[2].to_dense().flatten()])
    assert torch.equal(bucket.flat, want)


def test_many_small_gradients_are_copied_in_one_go() -> None:
    params = [nn.Parameter(torch.zeros(10)) for _ in range(5)]
    bucket = bucket_of(*params)
    for param in params:
        param.grad = torch.ones(10)
    bucket.gather()
    assert bucket.take(None) is None
    assert bucket.flat.tolist() == [1.0] * 50

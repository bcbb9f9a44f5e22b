"""What docs/choosing.md says: its numbers by the formula, its table of optimizers by training."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable

import pytest
import torch
from torch import nn

import bagua
from bagua.comm.team import Team
from tests.docs.markdown import ROOT, table_after
from tests.rank_threads import run_teams

PAGE = ROOT / "docs" / "choosing.md"
TWO_HOSTS = "## 2 hosts, 1 Gbit/s, 100 M parameters, AdamW"
WAN = "## 8 hosts on a WAN of 100 Mbit/s"
PARAMETERS = 100_000_000


def algorithm(call: str) -> bagua.Algorithm:
    """What a cell such as `"bytegrad", codec="int4"` stands for, with AdamW."""
    made: bagua.Algorithm = eval(f"get({call.strip('`')})", {"get": bagua.algorithms.get})
    return made.for_optimizers([torch.optim.AdamW([nn.Parameter(torch.zeros(1))])])


def section(heading: str) -> str:
    return PAGE.read_text().split(f"\n{heading}\n", 1)[1].split("\n## ", 1)[0]


@pytest.mark.parametrize(("heading", "ranks", "rate"), [(TWO_HOSTS, 2, 1e9), (WAN, 8, 100e6)])
def test_bytes_and_seconds_are_those_of_the_formula(heading: str, ranks: int, rate: float) -> None:
    rows = table_after(PAGE, heading)
    assert len(rows) >= 3
    for call, megabytes, seconds in rows:
        sent = algorithm(call).bytes_per_rank(PARAMETERS, ranks)
        assert abs(float(megabytes) - sent / 1e6) <= 0.0501, (call, sent)
        assert abs(float(seconds) - 8 * sent / rate) <= 0.00501, (call, 8 * sent / rate)


def test_the_mean_with_a_warm_up_is_that_of_the_formula() -> None:
    sent = [algorithm(call).bytes_per_rank(PARAMETERS, 2) for call in ('"gradient_allreduce"', '"qadam", codec="sign"')]
    mean = 8 * (0.2 * sent[0] + 0.8 * sent[1]) / 1e9
    assert f"warm-up the mean is {mean:.2f} s" in section(TWO_HOSTS)


def test_intervals_are_those_of_the_rule() -> None:
    text = section(WAN)
    assert "H >= round / (0.2 * step)" in text
    heads = re.search(r"^\| a round with .*$", text, re.MULTILINE)
    assert heads is not None
    steps = [float(found) for found in re.findall(r"steps of ([\d.]+) s", heads[0])]
    rows = re.findall(r"^\| `(codec=\S+)` \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 4 and len(steps) == 3
    for codec, rest in rows:
        exchange = algorithm(f'"diloco", communication_interval=1, {codec}')
        seconds = 8 * exchange.bytes_per_rank(PARAMETERS, 8) / 100e6
        shown, *intervals = rest.split(" | ")
        assert abs(float(shown) - seconds) <= 0.00501, codec
        assert [int(each) for each in intervals] == [math.ceil(seconds / (0.2 * step)) for step in steps]
        for interval, step in zip(map(int, intervals), steps, strict=True):
            assert seconds <= 0.2 * interval * step, "communication is more than 20 % of the computing"


def halves(params: list[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    return [each for each in params if each.ndim == 2], [each for each in params if each.ndim != 2]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]] = {
    "SGD": lambda p: [torch.optim.SGD(p, 0.1)],
    "SGD with momentum": lambda p: [torch.optim.SGD(p, 0.05, momentum=0.9)],
    "Adam": lambda p: [torch.optim.Adam(p, 0.02)],
    "AdamW": lambda p: [torch.optim.AdamW(p, 0.02)],
    "Adagrad, RMSprop": lambda p: [torch.optim.Adagrad(p[:1], 0.1), torch.optim.RMSprop(p[1:], 0.01)],
    "`bagua.optim.QAdam`": lambda p: [bagua.optim.QAdam(p, 0.02, warmup_steps=5)],
    "`bagua.optim.ZeroOneAdam`": lambda p: [bagua.optim.ZeroOneAdam(p, 0.02, var_freeze_step=10)],
    "`bagua.optim.OneBitLamb`": lambda p: [bagua.optim.OneBitLamb(p, 0.05, warmup_steps=5)],
    "Muon": lambda p: [torch.optim.Muon(halves(p)[0], 0.02), torch.optim.AdamW(halves(p)[1], 0.02)],
    "Adafactor": lambda p: [torch.optim.Adafactor(p, 0.05)],
    "LBFGS": lambda p: [torch.optim.LBFGS(p, 0.3, max_iter=2)],
}
# A group of algorithms by one of them; they differ in codec or topology, not in what the optimizer sees.
GRADIENTS, WEIGHTS = "bytegrad", "local_sgd"
MOMENTA = ("qadam", "zero_one_adam", "one_bit_lamb")


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    x = torch.randn(16, 6, generator=generator)
    return (model(x) - x[:, :3] @ torch.ones(3, 2)).square().mean()


def mean_loss(team: Team, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> torch.Tensor:
    """A closure's: the gradient is the mean of the ranks' anyway, the loss is so by hand."""
    optimizer.zero_grad()
    loss = loss_of(model, step, team.rank)
    loss.backward()
    everyone = team.all_gather_bytes("the loss of a closure", struct.pack("d", loss.item()))
    return torch.tensor(sum(struct.unpack("d", one)[0] for one in everyone) / team.size)


def train(team: Team, name: str, algorithm: str) -> tuple[float, float]:
    """Loss on a batch apart, before and after."""
    model, generator = nn.Linear(6, 2), torch.Generator().manual_seed(0)  # ranks are threads: torch's own is shared
    for param in model.parameters():
        nn.init.normal_(param, std=0.3, generator=generator)
    optimizers = OPTIMIZERS[name](list(model.parameters()))
    bagua.distribute(model, optimizers, algorithm, process_group=team)
    before = loss_of(model.eval(), 1000, 0).item()
    model.train()
    for step in range(16):
        if isinstance(optimizers[0], torch.optim.LBFGS):
            batch = step if algorithm == "gradient_allreduce" else 0  # lossy gradients: as the page says
            optimizers[0].step(lambda batch=batch: mean_loss(team, model, optimizers[0], batch))
            continue
        model.zero_grad()
        loss_of(model, step, team.rank).backward()
        for optimizer in optimizers:
            optimizer.step()
    after = loss_of(model.eval(), 1000, 0).item()
    bagua.detach(model)
    return before, after


def refused(team: Team, name: str, algorithm: str) -> str:
    model = nn.Linear(6, 2)
    with pytest.raises(ValueError) as error:
        bagua.distribute(model, OPTIMIZERS[name](list(model.parameters())), algorithm, process_group=team)
    return str(error.value)


def rows_of_optimizers() -> list[list[str]]:
    rows = table_after(PAGE, "## By optimizer")
    assert {row[0] for row in rows} == {*OPTIMIZERS, "8-bit states (bitsandbytes, torchao)"}
    return [row for row in rows if row[0] in OPTIMIZERS]


def test_lbfgs_may_change_batches_with_exact_gradients() -> None:
    for before, after in run_teams(2, train, "LBFGS", "gradient_allreduce"):
        assert after < 0.95 * before


@pytest.mark.parametrize(
    ("name", "gradients", "momenta", "weights"), [row[:4] for row in rows_of_optimizers()], ids=lambda cell: cell
)
def test_optimizers_go_with_the_algorithms_of_the_table(name: str, gradients: str, momenta: str, weights: str) -> None:
    works = [each for each, cell in ((GRADIENTS, gradients), (WEIGHTS, weights)) if cell == "yes"]
    works += [] if momenta == "no" else [momenta.strip("`")]
    for each in works:
        for before, after in run_teams(2, train, name, each):
            assert after < 0.95 * before, each
    other = next(each for each in MOMENTA if each not in works)
    assert all("needs exactly one bagua.optim" in message for message in run_teams(2, refused, name, other))

"""The layer on several ranks against one process that holds all experts and all data, in fp64."""

from __future__ import annotations

import copy
import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bagua.comm.team import Team
from bagua.errors import CommunicationError, RankMismatchError
from bagua.moe import MoE, is_moe_param
from bagua.moe import gate as gate_module
from bagua.moe.spread import Spread
from bagua.moe.token_exchange import exchange_tokens
from tests.moe import oracle
from tests.rank_threads import _run, run_teams, teams

WIDTH = 6
AUX = 0.3


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise: ranks are threads here, which share a generator."""
    monkeypatch.setattr(gate_module, "_gumbel", torch.zeros_like)


def tokens(rank: int, count: int) -> Tensor:
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64)


def experts(count: int) -> list[nn.Module]:
    made, generator = [oracle.expert(WIDTH).double() for _ in range(count)], torch.Generator().manual_seed(7)
    with torch.no_grad():
        for param in nn.ModuleList(made).parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=param.dtype) / 2)
    return made


def make(team: Any, num_local: int, **options: Any) -> MoE:
    """A layer whose expert number e is `experts()[e]`, and whose gate is the same everywhere."""
    layer = MoE(WIDTH, oracle.expert(WIDTH), num_local, process_group=team, **options).double()
    rank, size = (team.rank, team.size) if team is not None else (0, 1)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(3)
        layer.bagua_moe.gate.wg.weight.copy_(torch.randn(num_local * size, WIDTH, generator=generator))
        for local, whole in enumerate(experts(num_local * size)[rank * num_local : (rank + 1) * num_local]):
            layer.bagua_moe.experts.bagua_experts[local].load_state_dict(whole.state_dict())
    return layer


def step(team: Any, num_local: int, counts: Sequence[int], options: dict[str, Any]) -> dict[str, Any]:
    layer = make(team, num_local, random_token_selection=False, **options).train()
    x = tokens(team.rank, counts[team.rank]).requires_grad_()
    out, l_aux, exp_counts = layer(x)
    (loss_of(out) + AUX * l_aux).backward()
    parts = layer.bagua_moe.experts.bagua_experts
    return {
        "out": out.detach(),
        "l_aux": l_aux.detach(),
        "counts": exp_counts,
        "dropped": layer.bagua_moe.num_dropped,
        "gate": layer.bagua_moe.gate.wg.weight.grad,
        "experts": [[param.grad for param in part.parameters()] for part in parts],
        "x": x.grad,
    }


def loss_of(out: Tensor) -> Tensor:
    return (out * torch.linspace(-1, 1, WIDTH, dtype=out.dtype)).square().sum() / max(len(out), 1) + out.sin().sum()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(
    ("size", "num_local", "k", "counts", "factor"),
    [
        (3, 2, 1, [9, 14, 5], 1.0),
        (3, 2, 2, [9, 14, 5], 0.5),
        (2, 3, 2, [11, 0], 10.0),  # a rank without tokens
        (3, 1, 1, [2, 1, 2], 0.2),  # most parts are empty
        (4, 1, 2, [8, 7, 6, 5], 1.0),
        (1, 4, 2, [12], 1.0),
    ],
)
def test_outputs_and_gradients_are_those_of_one_process(
    size: int, num_local: int, k: int, counts: list[int], factor: float
) -> None:
    options = {"k": k, "capacity_factor": factor, "min_capacity": 0}
    got = run_teams(size, step, num_local, counts, options)
    whole, gate = experts(num_local * size), make_gate(num_local * size)
    losses, xs = [], []
    for rank in range(size):
        x = tokens(rank, counts[rank]).requires_grad_()
        xs.append(x)
        if not len(x):
            losses.append(torch.zeros((), dtype=torch.float64))
            continue
        logits = x @ gate.T
        gates = torch.softmax(logits, 1)
        capacity = max(-(-k * len(x) * factor // (num_local * size)), 0)
        expected = oracle.route(logits.detach().numpy(), k, capacity)
        out = oracle.answer(x, expected, gates, whole, k)
        shares = torch.tensor(expected.counts, dtype=torch.float64) / len(x)
        l_aux = (gates.mean(0) * shares).sum() * num_local * size
        losses.append(loss_of(out) + AUX * l_aux)
        torch.testing.assert_close(got[rank]["out"], out.detach(), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(got[rank]["l_aux"], l_aux.detach(), rtol=1e-9, atol=1e-9)
        assert got[rank]["counts"].tolist() == expected.counts
        assert got[rank]["dropped"] == expected.dropped
    (sum(losses) / size).backward()  # type: ignore[union-attr]
    mean_gate = sum(each["gate"] for each in got) / size  # what gradient_allreduce makes
    torch.testing.assert_close(mean_gate, gate.grad, rtol=1e-9, atol=1e-9)
    for number, expert in enumerate(whole):
        mine = got[number // num_local]["experts"][number % num_local]
        for grad, param in zip(mine, expert.parameters(), strict=True):
            wanted = torch.zeros_like(param) if param.grad is None else param.grad
            torch.testing.assert_close(grad, wanted, rtol=1e-9, atol=1e-9)
    for rank, x in enumerate(xs):
        if len(x):
            torch.testing.assert_close(got[rank]["x"] / size, x.grad, rtol=1e-9, atol=1e-9)


def make_gate(num_experts: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(num_experts, WIDTH, generator=generator).double().requires_grad_()


def test_gradient_sum_is_the_originals() -> None:
    options: dict[str, Any] = {"k": 1, "drop_tokens": False}
    mean = run_teams(2, step, 1, [5, 7], options)
    total = run_teams(2, step, 1, [5, 7], {**options, "gradient": "sum"})
    for left, right in zip(mean, total, strict=True):
        for a, b in zip(left["experts"][0], right["experts"][0], strict=True):
            torch.testing.assert_close(2 * a, b, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(left["x"], right["x"], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(left["gate"], right["gate"], rtol=1e-12, atol=1e-12)


SPLITS = [[3, 0, 2], [0, 0, 0], [1, 4, 0]]  # rows from rank (row) to rank (column)


def test_rows_travel_with_splits_of_any_size() -> None:
    def run(team: Team) -> tuple[Tensor, Tensor]:
        spread, rank = Spread(team), team.rank
        to, fro = tuple(SPLITS[rank]), tuple(row[rank] for row in SPLITS)
        rows = (torch.arange(sum(to) * 2, dtype=torch.float64).view(-1, 2) + 100 * rank).requires_grad_()
        got = exchange_tokens(rows, spread, to, fro, grad_scale=0.5)
        (got * (rank + 1)).sum().backward()
        assert rows.grad is not None
        return got.detach(), rows.grad

    results = run_teams(3, run)
    sent = [torch.arange(sum(row) * 2, dtype=torch.float64).view(-1, 2) + 100 * r for r, row in enumerate(SPLITS)]
    for rank, (got, grad) in enumerate(results):
        parts = [sent[r].split(SPLITS[r])[rank] for r in range(3)]
        assert torch.equal(got, torch.cat(parts))
        owners = torch.tensor([1.0, 2.0, 3.0]).repeat_interleave(torch.tensor(SPLITS[rank])).double()
        assert torch.equal(grad, 0.5 * owners.unsqueeze(1).expand(-1, 2))


def test_a_second_derivative_travels_too() -> None:
    def run(team: Team) -> Tensor:
        x = torch.full((2, 3), float(team.rank + 2), dtype=torch.float64, requires_grad=True)
        y = exchange_tokens(x * x, Spread(team), (1, 1), (1, 1), grad_scale=0.5)
        (slope,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(slope.sum(), x)
        return torch.stack([slope.detach(), second])

    for rank, (slope, second) in enumerate(run_teams(2, run)):
        x = rank + 2.0  # 0.5 d/dx x^4 = 2 x^3 and then 6 x^2
        assert torch.allclose(slope, torch.tensor(2 * x**3).double())
        assert torch.allclose(second, torch.tensor(6 * x**2).double())


def test_eight_bits_are_near_and_what_stays_is_exact() -> None:
    def run(team: Team, codec: str | None, grad_codec: str | None) -> tuple[Tensor, Tensor, int]:
        spread = Spread(team)
        rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(team.rank)).requires_grad_()
        got = exchange_tokens(rows, spread, (4, 4), (4, 4), _codec(codec), _codec(grad_codec))
        sent = spread.bytes_sent()
        (got * torch.linspace(-1, 1, 64)).sum().backward()
        assert rows.grad is not None
        return got.detach(), rows.grad, sent

    exact, forward, backward = (run_teams(2, run, *codecs) for codecs in MODES)
    for rank in range(2):
        mine, other = slice(4 * rank, 4 * rank + 4), slice(4 - 4 * rank, 8 - 4 * rank)
        got, want = forward[rank][0], exact[rank][0]
        assert torch.equal(got[mine], want[mine])
        ranges = want[other].amax(1) - want[other].amin(1)
        error = (got[other] - want[other]).abs().amax(1)
        assert (error > 0).all() and (error <= ranges / 500).all()
        assert torch.equal(forward[rank][1], exact[rank][1])  # the gradient passes the codec as it is
        assert torch.equal(backward[rank][0], want)
        assert 0 < (backward[rank][1] - exact[rank][1]).abs().max() <= 2 / 500
        assert exact[rank][2] == 4 * 64 * 4
        assert forward[rank][2] == 4 * (64 + 8)


MODES = [(None, None), ("minmax_uint8", None), (None, "minmax_uint8")]


def _codec(name: str | None) -> Any:
    from bagua import codecs

    return None if name is None else codecs.get(name)


@pytest.mark.usefixtures("quiet")
def test_a_layer_with_eight_bits_is_near_the_exact_one() -> None:
    options: dict[str, Any] = {"k": 2, "drop_tokens": False}
    exact = run_teams(2, step, 2, [12, 9], options)
    rough = run_teams(2, step, 2, [12, 9], {**options, "codec": "minmax_uint8", "grad_codec": "minmax_uint8"})
    for left, right in zip(exact, rough, strict=True):
        for name in ("out", "x", "gate"):
            distance = (left[name] - right[name]).norm() / left[name].norm()
            assert 0 < distance < 0.02, name


def test_used_token_and_shapes() -> None:
    layer = make(None, 3, k=2, drop_tokens=False).eval()
    x = tokens(0, 12).view(3, 4, WIDTH)
    used = torch.ones(3, 4)
    used[1, 2] = 0
    out, _, counts = layer(x, used)
    assert out.shape == x.shape and not out[1, 2].any() and out[1, 1].any()
    assert int(counts.sum()) == 11
    torch.testing.assert_close(out[0], layer(x)[0][0])


def test_dropout_acts_in_training() -> None:
    layer = make(None, 2, output_dropout_prob=0.5, drop_tokens=False)
    x = tokens(0, 200)
    assert 0.3 < (layer(x)[0] == 0).double().mean() < 0.7
    assert not (layer.eval()(x)[0] == 0).any()


def test_without_a_process_group_experts_are_ordinary_parameters() -> None:
    layer = MoE(4, nn.Linear(4, 4), 3)
    assert layer.num_experts == 3 and not any(map(is_moe_param, layer.parameters()))


def test_experts_are_marked_and_copies_and_pickles_are_too() -> None:
    def run(team: Team) -> None:
        layer = MoE(4, nn.Linear(4, 4), 3, process_group=team)
        layer(torch.randn(5, 4))  # leaves a loss with a graph behind
        for each in (layer, copy.deepcopy(layer)):
            marked = {name for name, param in each.named_parameters() if is_moe_param(param)}
            assert marked == {f"bagua_moe.experts.bagua_experts.{i}.{w}" for i in range(3) for w in ("weight", "bias")}
        copied = copy.deepcopy(layer)
        assert copied.bagua_moe.spread is layer.bagua_moe.spread
        assert copied(torch.ones(5, 4))[0].shape == (5, 4)

    run_teams(2, run)
    layer = MoE(4, nn.Linear(4, 4), 2)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    x = torch.ones(3, 4)
    assert torch.equal(again.eval()(x)[0], layer.eval()(x)[0])


def test_an_expert_may_return_a_tuple() -> None:
    class Pair(nn.Linear):
        def forward(self, input: Tensor) -> Any:
            return super().forward(input), None

    assert MoE(4, Pair(4, 4), 2)(torch.ones(8, 4))[0].shape == (8, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert": nn.Linear}, "expert: expected a torch.nn.Module"),
        ({"num_local_experts": 0}, "num_local_experts: expected an integer >= 1, got 0"),
        ({"gradient": "total"}, "gradient: expected one of"),
        ({"k": 3}, "k: expected 1 or 2 experts per token"),
        ({"codec": "minmax"}, "minmax"),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        MoE(**{"hidden_size": 4, "expert": nn.Linear(4, 4), **options})


def test_wrong_inputs_are_named() -> None:
    with pytest.raises(ValueError, match=r"hidden_states: expected \[..., 4\], got \[2, 3\]"):
        MoE(4, nn.Linear(4, 4))(torch.ones(2, 3))
    with pytest.raises(ValueError, match="hidden_states: expected floating-point numbers"):
        MoE(4, nn.Linear(4, 4))(torch.ones(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"expert 0: returned shape \[2, 3\] for input \[2, 4\]"):
        MoE(4, nn.Linear(4, 3))(torch.ones(2, 4))


def test_ranks_in_different_layers_are_told_so() -> None:
    def run(team: Team) -> None:
        width = 4 + team.rank
        layer = MoE(width, nn.Linear(width, width), process_group=team)
        with pytest.raises(RankMismatchError, match=f"rank {1 - team.rank} sends rows of {5 - team.rank} elements"):
            layer(torch.ones(3, width))

    run_teams(2, run)


def test_a_rank_that_does_not_come_is_an_error() -> None:
    def run(team: Team) -> None:
        layer = MoE(4, nn.Linear(4, 4), process_group=team)
        layer(torch.ones(3, 4))
        if team.rank == 0:
            with pytest.raises(CommunicationError, match="MoE: counts of an all-to-all on rank 0 of 2"):
                layer(torch.ones(3, 4))

    _run(teams(2, timeout_s=4), run, (), 90)

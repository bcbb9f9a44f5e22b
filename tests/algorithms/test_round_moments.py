"""`mean_moments` of local_sgd and diloco: a numpy oracle, and that Adam's moments are then those of mean gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua.algorithms import Algorithm, DiLoCo, GradientAllReduce, LocalSGD, Warmup, round_moments
from bagua.algorithms.mean_moments import Slot
from bagua.codecs import native
from bagua.comm.team import Team
from tests.algorithms.defaults import told_and_kept
from tests.algorithms.momentum import Plain, interrupted
from tests.algorithms.quadratic import N, Quadratic, follow, start, targets
from tests.rank_threads import run_teams

STEPS, LR, B1, B2, EPS, DECAY = 24, 0.05, 0.9, 0.97, 1e-8, 0.1
TOLERANCE = 3e-4
PLAIN: dict[str, Any] = {"outer_lr": 1.0, "outer_momentum": 0.0}
ROUNDS_OF_4: dict[str, Any] = {"communication_interval": 4, **PLAIN}


def local(interval: int, mean_moments: bool = True, codec: Any = "identity", **options: Any) -> LocalSGD:
    return LocalSGD(interval, codec=codec, mean_moments=mean_moments, **options)


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **{"lr": LR, "betas": (B1, B2), "eps": EPS, "weight_decay": DECAY, **options})


def oracle(size: int, interval: int, inferred: bool = True, begin: int = 0, falling: bool = False) -> np.ndarray:
    """Weights after each step, [STEPS, size, N]; mean gradients before `begin`.

    The rank's own average gradient is made of its gradients, the mean of all ranks of their displacements.
    """
    x = np.tile(start(), (size, 1))
    m, v, seen = np.zeros_like(x), np.zeros_like(x), []
    v_0, gradients_of_round, moved = v.copy(), [], 0.0
    for k in range(1, STEPS + 1):
        lr = LR * 0.97 ** (k - 1) if falling else LR
        g = x - targets(size, k - 1)
        if k <= begin:
            g = np.tile(g.mean(0), (size, 1))
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        divisor = np.sqrt(v / (1 - B2**k)) + EPS
        x = x * (1 - lr * DECAY) - lr / (1 - B1**k) * m / divisor
        if k <= begin:
            v_0 = v.copy()
        else:
            gradients_of_round.append(g)
            moved += lr / (1 - B1**k) * (1 - B1 ** len(gradients_of_round))
        if k > begin and k % interval == 0:
            mean = np.tile(x.mean(0), (size, 1))
            if inferred and len(gradients_of_round) == interval:
                weights = np.array([1 - B1 ** (interval - j) for j in range(interval)])
                apart = divisor * (x - mean) / moved
                of_all = np.einsum("k,krn->rn", weights / weights.sum(), np.stack(gradients_of_round)) + apart
                spread = (weights**2).sum() / weights.sum() ** 2
                added = (v - B2**interval * v_0) / (1 - B2**interval)
                mix = (1 - spread) / (size - spread)
                v = B2**interval * v_0 + (1 - B2**interval) * ((1 - mix) * of_all**2 + mix * added)
                m = m + (1 - B1**interval) * apart
            x, v_0, gradients_of_round, moved = mean, v.copy(), [], 0.0
        seen.append(x)
    return np.stack(seen)


def check(results: list, want: np.ndarray) -> None:
    for rank, result in enumerate(results):
        assert np.abs(result[0] - want[:, rank]).max() < TOLERANCE


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("interval", [1, 2, 4])
def test_is_the_oracles(size: int, interval: int) -> None:
    check(run_teams(size, partial(follow, bucket_bytes=8), local(interval), STEPS, adamw), oracle(size, interval))
    apart = np.abs(oracle(size, interval) - oracle(size, interval, inferred=False)).max()
    assert apart > 50 * TOLERANCE, "the oracle would not notice"


@pytest.mark.parametrize(
    "algorithm",
    [
        local(3, codec=Plain()),
        DiLoCo(3, codec="identity", mean_moments=True, **PLAIN),
        DiLoCo(3, codec=Plain(), mean_moments=True, **PLAIN),
        local(3, hierarchical=True),
    ],
    ids=["changes", "diloco", "diloco, changes", "hierarchical"],
)
def test_all_ways_to_average(algorithm: Algorithm) -> None:
    check(run_teams(3, follow, algorithm, STEPS, adamw, nodes=[0, 0, 1]), oracle(3, 3))


def follow_two(team: Team, algorithm: Algorithm, *makes: Any) -> tuple[np.ndarray, dict[str, int]]:
    """Weights after 24 steps in which b and w have an optimizer each, and names and sizes of what is kept."""
    model = Quadratic()
    params = [model.b, model.w]
    optimizers = [make([param]) for make, param in zip(makes, params, strict=True)]
    bagua.distribute(model, optimizers, algorithm, process_group=team, bucket_bytes=1 << 20)
    for step in range(STEPS):
        for each in optimizers:
            each.zero_grad()
        model(torch.tensor(targets(3, step)[team.rank], dtype=torch.float32)).backward()
        for each in optimizers:
            each.step()
    kept = {each["name"]: each["value"].numel() for each in bagua.state_dict(model)["tensors"]}
    bagua.detach(model)
    return torch.cat([each.detach().view(-1) for each in params]).numpy(), kept


@pytest.mark.parametrize("adam_first", [False, True])
def test_other_optimizers_beside_adam(adam_first: bool) -> None:
    """Adam's parameters train as they do alone, those of SGD as without `mean_moments`; nothing is kept for these."""
    makes = [partial(torch.optim.SGD, lr=LR), adamw][:: -1 if adam_first else 1]
    found = run_teams(3, follow_two, local(3), *makes)
    plain = run_teams(3, follow_two, local(3, mean_moments=False), *makes)
    b = Quadratic().b.numel()
    of_adam, of_sgd = (slice(0, b), slice(b, N))[:: 1 if adam_first else -1]
    want = oracle(3, 3)[-1]
    for rank, ((mine, kept), (other, _)) in enumerate(zip(found, plain, strict=True)):
        assert kept["momenta"] == kept["second"] == (b if adam_first else N - b)
        assert np.abs(mine - want[rank])[of_adam].max() < TOLERANCE < np.abs(mine - other)[of_adam].max() / 20
        assert np.array_equal(mine[of_sgd], other[of_sgd])


def test_an_adam_of_another_kind_beside_adam_keeps_its_moments() -> None:
    nadam = partial(torch.optim.NAdam, lr=LR)
    found = run_teams(3, follow_two, LocalSGD(1), adamw, nadam)
    plain = run_teams(3, follow_two, local(1, mean_moments=False), adamw, nadam)
    b = Quadratic().b.numel()
    for (mine, kept), (other, _) in zip(found, plain, strict=True):
        assert "momenta" in kept and not np.array_equal(mine[:b], other[:b])
        assert np.array_equal(mine[b:], other[b:])
    assert all("momenta" not in kept for _, kept in run_teams(3, follow_two, LocalSGD(1), nadam, nadam))


def test_large_parameters_go_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_moments, "_BLOCK", 8)
    check(run_teams(3, follow, local(2), STEPS, adamw), oracle(3, 2))


def test_one_rank_is_plain_adam() -> None:
    alone, plain = (run_teams(1, follow, each, STEPS, adamw)[0] for each in (LocalSGD(2), GradientAllReduce()))
    assert np.array_equal(alone[0], plain[0]) and not any("mean_moments" in each for each in alone[1].notices)


def test_the_learning_rate_is_that_of_each_step() -> None:
    size = 3

    def run(team: Team) -> np.ndarray:
        model = Quadratic()
        own = adamw(model.parameters())
        schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.97)
        bagua.distribute(model, own, local(3), process_group=team)
        seen = []
        for step in range(STEPS):
            own.zero_grad()
            model(torch.tensor(targets(size, step)[team.rank], dtype=torch.float32)).backward()
            own.step()
            schedule.step()
            seen.append(torch.cat([model.b.detach(), model.w.detach().reshape(-1)]).double().numpy())
        bagua.detach(model)
        return np.stack(seen)

    want = oracle(size, 3, falling=True)
    for rank, seen in enumerate(run_teams(size, run)):
        assert np.abs(seen - want[:, rank]).max() < TOLERANCE


@pytest.mark.parametrize("begin", [4, 6])
def test_after_a_warm_up(begin: int) -> None:
    """The moments at hand are those of mean gradients. From a round that is not whole nothing is inferred."""
    algorithm = Warmup(begin, "gradient_allreduce", local(2))
    check(run_teams(3, follow, algorithm, STEPS, adamw), oracle(3, 2, begin=begin))
    odd = Warmup(begin + 1, "gradient_allreduce", local(2))
    check(run_teams(3, follow, odd, STEPS, adamw), oracle(3, 2, begin=begin + 1))


def test_fused_optimizers() -> None:
    check(run_teams(2, follow, local(2), STEPS, lambda params: bagua.optim.fuse(adamw(params))), oracle(2, 2))


def test_little_is_sent_for_it() -> None:
    """A number for each of two parameters and round, in chunks of 16."""
    runs = [run_teams(2, follow, local(2, means), STEPS, adamw)[0][1] for means in (True, False)]
    assert 0 < runs[0].total.bytes_sent - runs[1].total.bytes_sent <= STEPS * 2 * 16 * 4
    assert local(2).bytes_per_rank(N, 2) == local(2, False).bytes_per_rank(N, 2)


@pytest.mark.parametrize("algorithm", [local(3), local(3, codec="minmax_uint8")], ids=["weights", "changes"])
def test_resume_is_bit_identical(algorithm: Algorithm) -> None:
    """Within a round, and right after one. Weights differ by rank, so each loads its own."""
    for whole, resumed in run_teams(2, interrupted, adamw, algorithm, [1, 6, 8], 18):
        for stop, other in resumed.items():
            assert torch.equal(whole, other), stop


def second_moment(team: Team, algorithm: Any) -> float:
    """Mean over the elements, after 120 steps with a small learning rate."""
    model = Quadratic()
    own = adamw(model.parameters(), lr=1e-3, weight_decay=0.0)
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(120):
        own.zero_grad()
        model(torch.tensor(targets(4, step)[team.rank], dtype=torch.float32)).backward()
        own.step()
    bagua.detach(model)
    return float(torch.cat([own.state[p]["exp_avg_sq"].reshape(-1) for p in (model.b, model.w)]).mean())


def test_second_moments_are_those_of_mean_gradients() -> None:
    """Within a few percent; a rank's own would be about four times as large where gradients are mostly noise."""
    exact = np.mean(run_teams(4, second_moment, "gradient_allreduce"))
    for algorithm, most in ((local(2), 0.1), (local(4), 0.1), (local(2, codec="minmax_uint8"), 0.1)):
        mean = np.mean(run_teams(4, second_moment, algorithm))
        assert abs(mean / exact - 1) < most, (algorithm, mean / exact)
    assert np.mean(run_teams(4, second_moment, local(2, False))) / exact > 1.4


def trained(team: Team, algorithm: Algorithm, meddle: Any, lr: float = LR) -> dict[str, torch.Tensor]:
    """Second moments after 12 steps, by name; `meddle` is called after each with the model and the step."""
    model = Quadratic()
    own = adamw(model.parameters(), lr=lr)
    bagua.distribute(model, own, algorithm, process_group=team)
    for step in range(12):
        own.zero_grad()
        model(torch.tensor(targets(3, step)[team.rank], dtype=torch.float32)).backward()
        own.step()
        meddle(model, step)
    bagua.detach(model)
    return {name: own.state[param]["exp_avg_sq"] for name, param in model.named_parameters()}


class Words(nn.Module):
    """Gradients that do not depend on the weights, of a table of which each rank uses a part."""

    ROWS, WIDTH = 6, 5

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(self.ROWS, width))
        self.bias = nn.Parameter(torch.zeros(3))

    def gradients(self, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Row 0 is of all ranks, row 1 of nobody, row 2 + r of rank r in every step, row 5 of rank 0 in odd steps."""
        noise = torch.Generator().manual_seed(100 * step + rank)
        drawn, bias = torch.randn(self.ROWS, self.table.shape[1], generator=noise), torch.randn(3, generator=noise)
        used = torch.zeros(self.ROWS, 1)
        used[0] = used[2 + rank] = 1.0
        used[5] = float(rank == 0 and step % 2)
        return drawn * used, bias

    def forward(self, rank: int, step: int) -> torch.Tensor:
        table, bias = self.gradients(rank, step)
        return (self.table * table).sum() + (self.bias * bias).sum()


def moments_of_words(team: Team, algorithm: Algorithm, steps: int, width: int) -> list[torch.Tensor]:
    model = Words(width)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(B1, B2))
    bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=16)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=False)
        model(team.rank, step).backward()
        optimizer.step()
    bagua.detach(model)
    return [optimizer.state[model.table]["exp_avg_sq"].clone()]


@pytest.mark.parametrize("width", [Words.WIDTH, 1 << 15])
@pytest.mark.parametrize(
    "algorithm",
    [local(2), local(4), local(2, codec="minmax_uint8"), DiLoCo(3, codec="eden:bits=3", mean_moments=True, **PLAIN)],
)
def test_rows_that_few_ranks_use_have_second_moments_of_mean_gradients(algorithm: Algorithm, width: int) -> None:
    """A rank that is alone in using a row has its own gradients, so nothing is estimated; others have no part in it."""
    size, steps = 3, 12
    found = run_teams(size, moments_of_words, algorithm, steps, width)
    want = torch.zeros(Words.ROWS, width)
    for step in range(steps):
        mean = sum(Words(width).gradients(rank, step)[0] for rank in range(size)) / size
        want = B2 * want + (1 - B2) * mean**2
    for rank, (second,) in enumerate(found):
        torch.testing.assert_close(second[2 + rank], want[2 + rank], rtol=1e-4, atol=1e-7)
        assert not second[1].any() or "eden" in repr(algorithm)
    torch.testing.assert_close(found[0][0][5], want[5], rtol=1e-4, atol=1e-7)


def test_a_parameter_that_something_else_changes_keeps_its_own_moments() -> None:
    """As a clamp does: bit for bit those without. The other parameter's are inferred."""

    def clamp(model: Quadratic, step: int) -> None:
        model.w.data.mul_(0.99)

    runs = [run_teams(3, trained, local(2, means), clamp) for means in (True, False)]
    for mean, plain in zip(*runs, strict=True):
        assert torch.equal(mean["w"], plain["w"])
        assert not torch.allclose(mean["b"], plain["b"], rtol=0.1)


def test_averages_of_weights_within_a_round_are_not_taken_for_steps() -> None:
    def average(model: Quadratic, step: int) -> None:
        if step % 2 == 0:  # each round has two steps
            bagua.average_parameters(model)

    runs = [run_teams(3, trained, local(2, means), average) for means in (True, False)]
    assert all(torch.equal(a[name], b[name]) for a, b in zip(*runs, strict=True) for name in a)


@pytest.mark.parametrize(("lr", "same"), [(1e-9, True), (1e-3, False)])
def test_steps_that_are_mostly_rounding_are_left_alone(lr: float, same: bool) -> None:
    runs = [run_teams(3, trained, local(2, means), lambda *_: None, lr) for means in (True, False)]
    assert all(torch.equal(a["w"], b["w"]) is same for a, b in zip(*runs, strict=True))


def test_without_a_learning_rate_nothing_is_inferred() -> None:
    for each in run_teams(3, trained, local(2), lambda *_: None, 0.0):
        assert all(value.isfinite().all() for value in each.values())


def test_parameters_without_gradients_are_left_alone() -> None:
    """Never used; used on rank 0 only; used until the fifth step; used in every other step."""

    class More(Quadratic):
        def __init__(self) -> None:
            super().__init__()
            self.never, self.early = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))
            self.mine, self.odd = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(5))

    def run(team: Team) -> list[torch.Tensor]:
        model = More()
        own = adamw(model.parameters(), weight_decay=0.0)
        bagua.distribute(model, own, local(2), process_group=team)
        for step in range(16):
            own.zero_grad()
            loss = model(torch.tensor(targets(2, step)[team.rank], dtype=torch.float32))
            loss = loss + model.early.square().sum() if step < 5 else loss
            loss = loss + model.odd.square().sum() if step % 2 else loss
            (loss + model.mine.square().sum() if team.rank == 0 else loss).backward()
            own.step()
        assert not own.state.get(model.never, {}).get("exp_avg", torch.zeros(1)).any()
        assert all(value.isfinite().all() for state in own.state.values() for value in state.values())
        bagua.detach(model)
        return [p.detach().clone() for p in model.parameters()]

    one, other = run_teams(2, run)
    assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("name", "make", "dtype", "options", "means"),
    [
        ("local_sgd", adamw, torch.float32, {}, True),
        ("local_sgd", torch.optim.Adam, torch.float64, {"communication_interval": 4}, True),
        ("local_sgd", adamw, torch.float32, {"communication_interval": 2, "codec": "int4"}, True),
        ("local_sgd", adamw, torch.float32, {"communication_interval": 2, "codec": "eden:bits=2"}, False),
        ("local_sgd", adamw, torch.float32, {"communication_interval": 5}, False),
        ("local_sgd", adamw, torch.float32, {"mean_moments": False}, False),
        ("local_sgd", adamw, torch.float32, {"scale_second_moment": True}, False),
        ("local_sgd", partial(adamw, amsgrad=True), torch.float32, {}, False),
        ("local_sgd", adamw, torch.bfloat16, {}, False),
        ("local_sgd", torch.optim.NAdam, torch.float32, {}, False),
        ("local_sgd", partial(torch.optim.SGD, lr=LR), torch.float32, {}, False),
        ("diloco", adamw, torch.float32, {}, True),
        ("diloco", adamw, torch.float32, {**ROUNDS_OF_4, "codec": "eden:bits=2"}, False),
        ("diloco", adamw, torch.float32, {"communication_interval": 2, **PLAIN}, True),
        ("diloco", adamw, torch.float32, {"communication_interval": 2}, False),
        ("diloco", adamw, torch.float32, {"mixing": 0.5, **ROUNDS_OF_4}, False),
        ("diloco", adamw, torch.float32, {"fragments": 2, "bucket_bytes": 8, **ROUNDS_OF_4}, False),
        ("diloco", adamw, torch.float32, {**PLAIN, "mean_moments": True}, True),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_default_depends_on_optimizer_and_options_and_is_told(
    name: str, make: Any, dtype: torch.dtype, options: dict[str, Any], means: bool
) -> None:
    def run(team: Team) -> tuple[tuple[str, ...], set[str]]:
        def loss(model: nn.Module, step: int) -> torch.Tensor:
            return model(torch.tensor(targets(2, step)[team.rank], dtype=dtype))

        return told_and_kept(team, name, Quadratic().to(dtype), make, loss, **options)

    for notices, kept in run_teams(2, run):
        assert ("momenta" in kept) == means
        assert any("(mean_moments)" in each for each in notices) == (means and "mean_moments" not in options)
        assert all(each.startswith(f"{name}: ") for each in notices)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (LocalSGD, {"scale_second_moment": True}),
        (DiLoCo, {"scale_second_moment": True}),
        (DiLoCo, {"communication_interval": 2}),
        (DiLoCo, {"outer_lr": 0.9, "outer_momentum": 0.0}),
        (DiLoCo, {"delay": 1, **PLAIN}),
        (DiLoCo, {"fragments": 2, **PLAIN}),
        (DiLoCo, {"mixing": 0.5, **PLAIN}),
    ],
)
def test_bad_options(algorithm: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mean_moments"):
        algorithm(**options, mean_moments=True)


@pytest.mark.parametrize("name", ["local_sgd", "diloco"])
def test_other_optimizers_and_16_bits_are_refused(name: str) -> None:
    def refused(team: Team, make: Any, dtype: torch.dtype) -> str:
        model = Quadratic().to(dtype)
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model.parameters()), name, process_group=team, mean_moments=True)
        return str(error.value)

    for make, dtype, word in (
        (partial(torch.optim.SGD, lr=0.1), torch.float32, "SGD"),
        (torch.optim.NAdam, torch.float32, "NAdam"),
        (partial(adamw, amsgrad=True), torch.float32, "amsgrad"),
        (adamw, torch.bfloat16, "16 bits"),
    ):
        assert all("mean_moments" in each and word in each for each in run_teams(2, refused, make, dtype))


def test_state_that_is_older_fits() -> None:
    """The option is not part of the name under which state is saved while it is open."""
    assert "mean_moments" not in repr(LocalSGD(8)) + repr(DiLoCo())
    assert repr(local(2)).endswith("mean_moments=True)")


@pytest.mark.parametrize(("interval", "size"), [(1, 2), (2, 4), (4, 8)])
def test_compiled_code_computes_the_same(interval: int, size: int) -> None:
    """To a few roundings, with weights that are too large and numbers that are not finite."""
    kernels = [each.infer_round for each in native.native_backends()[0].values() if each.infer_round is not None]
    if not kernels:
        pytest.skip("no compiled code")
    slot = Slot({"step": torch.tensor(20.0)}, {"betas": (B1, B2), "eps": EPS, "lr": LR})
    formulas = round_moments._Formulas.of(slot, 0.3 * LR, interval, size, torch.finfo(torch.float32).eps)
    made = torch.Generator().manual_seed(1)
    tensors = tuple(torch.randn(1003, generator=made) for _ in range(6))
    for k in (1, 3):
        tensors[k].square_()
    tensors[1][:7] = tensors[3][:7] = 0.0
    tensors[4][10:20] = 1e9
    tensors[4][30] = torch.nan
    tensors[5][40] = torch.inf
    want = tuple(each.clone() for each in tensors)
    formulas.apply_torch(want, torch.tensor(True))
    for kernel in kernels:
        got = tuple(each.clone() for each in tensors)
        formulas.apply(got, torch.tensor(True), kernel)
        for x, y in zip(got[:2], want[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)
            assert not torch.equal(x, tensors[0]) and not torch.equal(x, tensors[1])
        assert all(torch.equal(x[10:20], y[10:20]) for x, y in zip(got[:2], tensors, strict=False)), "too large"
        kept = tuple(each.clone() for each in tensors)
        formulas.apply(kept, torch.tensor(False), kernel)
        for x, y in zip(kept[:2], tensors[:2], strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0)

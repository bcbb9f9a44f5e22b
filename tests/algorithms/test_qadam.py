"""QAdam: Adam during the warm-up, then a plain numpy oracle of quantised momenta with a fixed second moment."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import bagua
from bagua import codecs
from bagua.algorithms import GradientAllReduce, QAdam, Warmup
from bagua.algorithms.feedback import fit_momentum_feedback
from bagua.codecs import Eden
from bagua.comm.team import Team
from tests.algorithms.momentum import Plain, interrupted, train
from tests.algorithms.quadratic import N, Quadratic, flat, follow, simulated, start, target, targets
from tests.engine.training import seeded
from tests.rank_threads import run_teams

SIZES = [1, 2, 3, 4]
STEPS, WARMUP, LR, B1, B2, EPS = 14, 6, 0.05, 0.9, 0.99, 1e-8


def optimizer(params: Any, **options: Any) -> bagua.optim.QAdam:
    return bagua.optim.QAdam(params, **{"lr": LR, "warmup_steps": WARMUP, "betas": (B1, B2), **options})


def oracle(
    size: int, steps: int = STEPS, weight_decay: float = 0.0, decoupled: bool = False
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights after each step [steps, N]; largest momentum that a rank would send; divisors at the end."""
    x, m, v, seen, sent = start(), np.zeros(N), np.zeros(N), [], []
    divisor = np.zeros(N)
    for k in range(1, steps + 1):
        gradients = x - targets(size, k - 1)
        sent.append(np.abs(B1 * m + (1 - B1) * gradients).max())
        gradient = gradients.mean(0) + (0 if decoupled else weight_decay * x)
        m = B1 * m + (1 - B1) * gradient
        if k <= WARMUP:
            v = B2 * v + (1 - B2) * gradient**2
        divisor = np.sqrt(v) / np.sqrt(1 - B2 ** min(k, WARMUP)) + EPS
        x = x * (1 - LR * weight_decay if decoupled else 1) - LR / (1 - B1**k) * m / divisor
        seen.append(x)
    return np.stack(seen), np.array(sent), divisor


def all_equal(results: list) -> bool:
    return all(np.array_equal(seen, results[0][0]) for seen, _ in results)


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(("weight_decay", "decoupled"), [(0.0, False), (0.1, False), (0.1, True)])
def test_the_optimizer_alone_is_adam_to_the_last_bit(foreach: bool, weight_decay: float, decoupled: bool) -> None:
    """AdamW with decoupled weight decay.

    Groups with options of their own, missing gradients, a scheduler and a parameter in another memory layout.
    """
    shapes = [(7, 5), (11,), (4, 3, 2, 2), ()]
    generator = torch.Generator().manual_seed(1)
    mine = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    mine[2].data = mine[2].data.to(memory_format=torch.channels_last)
    theirs = [nn.Parameter(p.detach().clone()) for p in mine]
    options = {"lr": 0.01, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": weight_decay}
    ours = bagua.optim.QAdam(
        [{"params": mine[:2]}, {"params": mine[2:], "lr": 0.1}],
        warmup_steps=30,
        decoupled_weight_decay=decoupled,
        **options,
    )
    adam = (torch.optim.AdamW if decoupled else torch.optim.Adam)(
        [{"params": theirs[:2]}, {"params": theirs[2:], "lr": 0.1}], foreach=foreach, **options
    )
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in (ours, adam)]
    for step in range(30):
        for index, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = q.grad = None
            if (step + index) % 4:
                p.grad = torch.randn(p.shape, generator=generator)
                q.grad = p.grad.clone()
        assert ours.step(lambda: 3.0) == 3.0
        adam.step()
        for each in schedules:
            each.step()
        assert all(torch.equal(p, q) for p, q in zip(mine, theirs, strict=True)), step
    assert ours.num_steps == 23


def test_alone_after_the_warm_up_the_second_moment_is_fixed() -> None:
    seen = run_teams(1, follow, GradientAllReduce(), STEPS, optimizer)[0][0]
    assert np.abs(seen - oracle(1)[0]).max() < 1e-5


@pytest.mark.parametrize(
    ("size", "weight_decay", "decoupled"),
    [(1, 0.3, True), (2, 0.0, False), (2, 0.3, True), (3, 0.3, False), (3, 0.3, True), (4, 0.0, False)],
)
def test_without_loss_it_is_the_oracle(size: int, weight_decay: float, decoupled: bool) -> None:
    """Also with several buckets; during the warm-up bit-equal to torch's Adam or AdamW on the mean gradient."""
    results = run_teams(size, along, QAdam(codec=Plain(), error_feedback=False), weight_decay, decoupled)
    want = oracle(size, weight_decay=weight_decay, decoupled=decoupled)[0]
    assert max(np.abs(seen - want).max() for seen, _ in results) < 2e-5
    assert all_equal(results)
    adam, _ = run_teams(size, along_adam, weight_decay, decoupled)[0]
    assert np.array_equal(results[0][0][:WARMUP], adam)


def along(team: Team, algorithm: QAdam, weight_decay: float, decoupled: bool) -> Any:
    options = {"weight_decay": weight_decay, "decoupled_weight_decay": decoupled}
    return follow(team, algorithm, STEPS, lambda p: optimizer(p, **options), bucket_bytes=100)


def along_adam(team: Team, weight_decay: float, decoupled: bool) -> Any:
    def adam(params: Any) -> torch.optim.Adam:
        kind = torch.optim.AdamW if decoupled else torch.optim.Adam
        return kind(params, lr=LR, betas=(B1, B2), eps=EPS, weight_decay=weight_decay)

    return follow(team, GradientAllReduce(), WARMUP, adam, bucket_bytes=100)


@pytest.mark.parametrize("size", SIZES)
def test_8_bits_stay_within_the_bound(size: int) -> None:
    """em, ex bound the errors of m and x: em' = b1 em + (1 - b1) ex + e, ex' = ex + l em' / D, with e the error of
    two quantisations, 0.51/255 of a range each."""
    want, sent, divisor = oracle(size)
    em, ex, bounds = np.zeros(N), np.zeros(N), []
    for k in range(1, STEPS + 1):
        if k > WARMUP:
            error = 2 * 0.51 / 255 * 2 * (sent[k - 1] + em.max() + ex.max()) if size > 1 else 0
            em = B1 * em + (1 - B1) * ex + error
            ex = ex + LR / (1 - B1**k) * em / divisor
        bounds.append(ex + 2e-5)
    results = run_teams(size, follow, QAdam(), STEPS, optimizer)
    for seen, _ in results:
        assert (np.abs(seen - want) <= np.stack(bounds)).all()
    assert all_equal(results)
    if size > 1:
        assert np.abs(results[0][0] - want).max() > 1e-5, "nothing was quantised"


def test_1_bit_with_error_feedback_tracks_adam() -> None:
    """Where exact momenta lead, give or take a tenth of the way; without feedback it stays over three times as far."""
    size, steps = 2, 220
    settle = {}
    for name, algorithm in {
        "exact": QAdam(codec="identity"),
        "fed back": QAdam(codec="sign"),
        "lost": QAdam(codec="sign", error_feedback=False),
    }.items():
        results = simulated(size, algorithm, steps, lambda p: optimizer(p, lr=0.02, warmup_steps=60))
        assert all_equal(results)
        settle[name] = results[0][0]
    apart = {name: np.linalg.norm(seen[-60:] - settle["exact"][-60:], axis=1).mean() for name, seen in settle.items()}
    assert apart["fed back"] < 0.1 * np.linalg.norm(start()), apart
    assert apart["fed back"] < apart["lost"] / 3, apart


def test_error_feedback_follows_the_codec() -> None:
    assert "error feedback" in QAdam(codec="sign").exchange.name
    assert "error feedback" not in QAdam().exchange.name
    assert "error feedback" in QAdam(error_feedback=True).exchange.name
    assert "error feedback" not in QAdam(codec="sign", error_feedback=False).exchange.name
    assert QAdam(codec="sign").bytes_per_rank(1 << 20, 4) < QAdam().bytes_per_rank(1 << 20, 4) / 6


@pytest.mark.parametrize("nodes", [[0, 0, 0, 1], [0, 1, 2], [0, 0]])
def test_hierarchical(nodes: list[int]) -> None:
    """Nodes of unequal size weigh by their ranks; with one node nothing is quantised."""
    size = len(nodes)
    algorithm = QAdam(codec=Plain(), error_feedback=False, hierarchical=True)
    results = run_teams(size, follow, algorithm, STEPS, optimizer, nodes=nodes)
    assert max(np.abs(seen - oracle(size)[0]).max() for seen, _ in results) < 2e-5
    coarse = run_teams(size, follow, QAdam(codec="sign"), STEPS, optimizer, nodes=nodes)
    assert all_equal(results) and all_equal(coarse)


@pytest.mark.parametrize("codec", ["minmax_uint8", "sign"])
def test_resume_is_bit_identical(codec: str) -> None:
    stops = (4, WARMUP - 1, WARMUP, WARMUP + 1, WARMUP + 5)
    results = run_teams(3, interrupted, optimizer, QAdam(codec=codec), stops, WARMUP + 9)
    for whole, resumed in results:
        assert [stop for stop in stops if not torch.equal(whole, resumed[stop])] == []
        assert torch.equal(whole, results[0][0])


def switching(team: Team) -> list[np.ndarray]:
    """Algorithms change in mid-training; the optimizer counts on."""
    model, seen = Quadratic(), []
    own = optimizer(model.parameters())
    for number, algorithm in enumerate(["gradient_allreduce", QAdam(codec=Plain()), "gradient_allreduce", QAdam()]):
        bagua.distribute(model, own, algorithm, process_group=team, bucket_bytes=100)
        for step in range(7 * number, 7 * number + 7):
            train(team, model, own, range(step, step + 1), none=True)
            seen.append(flat(model).detach().double().numpy().copy())
    bagua.detach(model)
    return [np.stack(seen), np.array([own.num_steps])]


def test_switching_algorithms() -> None:
    """Exact gradients give the same steps as exact momenta, so all but the last part follow the oracle."""
    results = run_teams(3, switching)
    want = oracle(3, steps=28)[0]
    for seen, count in results:
        assert np.abs(seen[:21] - want[:21]).max() < 2e-5 and count[0] == 28
        assert np.abs(seen - want).max() < 0.1
        assert np.array_equal(seen, results[0][0])


def grown(team: Team, make: Any, algorithm: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two words more: the script puts a larger parameter, and its state, in the place of the old one."""
    words = nn.Embedding(6, 4)
    model = seeded(lambda: nn.Sequential(words, nn.Linear(4, 1)), 0)
    own = make(model.parameters())
    bagua.distribute(model, own, algorithm, process_group=team)

    def train_on(words: torch.Tensor) -> None:
        for _ in range(4):
            own.zero_grad()
            model(words).square().mean().backward()
            own.step()

    train_on(torch.arange(6))
    before, more = words.weight, torch.ones(2, 4)
    after = words.weight = nn.Parameter(torch.cat([before.detach(), more]))
    for group in own.param_groups:
        group["params"] = [after if param is before else param for param in group["params"]]
    own.state[after] = {
        key: torch.cat([value, 0 * more]) if isinstance(value, torch.Tensor) and value.dim() == 2 else value
        for key, value in own.state.pop(before).items()
    }
    bagua.distribute(model, own, algorithm)
    begun = after.detach().clone()
    train_on(torch.arange(8))
    assert own.num_steps == 8
    bagua.detach(model)
    return begun, after.detach().clone()


@pytest.mark.parametrize(
    ("algorithm", "make"),
    [
        ("qadam", lambda params: bagua.optim.QAdam(params, warmup_steps=2)),
        ("one_bit_lamb", lambda params: bagua.optim.OneBitLamb(params, warmup_steps=2)),
        ("zero_one_adam", lambda params: bagua.optim.ZeroOneAdam(params, var_freeze_step=2)),
    ],
)
def test_parameters_replaced_in_the_optimizers_groups(algorithm: str, make: Any) -> None:
    results = run_teams(2, grown, make, algorithm)
    for begun, after in results:
        assert torch.equal(after, results[0][1]) and not torch.equal(after[:6], begun[:6])


def test_within_warmup() -> None:
    """The algorithm's own warm-up begins with the optimizer's steps, not with the hand-over."""
    algorithm = Warmup(5, "gradient_allreduce", QAdam(codec=Plain()))
    results = run_teams(2, follow, algorithm, STEPS, optimizer)
    assert max(np.abs(seen - oracle(2)[0]).max() for seen, _ in results) < 2e-5


def clipped_and_scaled(team: Team, scale: float) -> np.ndarray:
    """As with `GradScaler`: the loss is scaled, the gradient is unscaled and clipped before the step."""
    model, seen = Quadratic(), []
    own = optimizer(model.parameters())
    bagua.distribute(model, own, QAdam(codec=Plain()), process_group=team)
    for step in range(STEPS):
        own.zero_grad()
        (scale * model(torch.tensor(target(team.rank, step), dtype=torch.float32))).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= scale
        nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        own.step()
        seen.append(flat(model).detach().double().numpy().copy())
    bagua.detach(model)
    return np.stack(seen)


def test_loss_scaling_and_clipping_act_on_the_mean() -> None:
    plain, scaled = (run_teams(2, clipped_and_scaled, scale) for scale in (1.0, 1024.0))
    assert np.abs(plain[0] - scaled[0]).max() < 1e-4
    assert all(np.array_equal(one, scaled[0]) for one in scaled)
    assert np.abs(plain[0] - oracle(2)[0]).max() > 1e-3, "nothing was clipped"


def accumulated(team: Team, sync: bool) -> np.ndarray:
    """Two backward passes for a step; their sum is what counts, whether the first is synchronised or not."""
    model, seen = Quadratic(), []
    own = optimizer(model.parameters())
    bagua.distribute(model, own, QAdam(codec=Plain()), process_group=team)
    for step in range(STEPS):
        own.zero_grad()
        loss = model(torch.tensor(target(team.rank, step), dtype=torch.float32)) / 2
        if sync:
            loss.backward(retain_graph=True)
        else:
            with bagua.no_sync(model):
                loss.backward(retain_graph=True)
        loss.backward()
        own.step()
        seen.append(flat(model).detach().double().numpy().copy())
    bagua.detach(model)
    return np.stack(seen)


@pytest.mark.parametrize("sync", [False, True])
def test_several_backward_passes(sync: bool) -> None:
    for seen in run_teams(2, accumulated, sync):
        assert np.abs(seen - oracle(2)[0]).max() < 2e-5


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda m: torch.optim.Adam(m.parameters()), ("qadam", "bagua.optim.QAdam", "Adam")),
        (lambda m: [bagua.optim.QAdam(p.parameters()) for p in (m.one, m.two)], ("exactly one", "QAdam, QAdam")),
        (lambda m: bagua.optim.QAdam(m.one.parameters()), ("all trainable", "two.weight", "two.bias")),
        (lambda m: [], ("exactly one", "none")),
    ],
)
def test_wrong_optimizers_are_refused_in_distribute(make: Any, words: tuple[str, ...]) -> None:
    def refused(team: Team) -> str:
        model = Other()
        with pytest.raises(ValueError) as error:
            bagua.distribute(model, make(model), "qadam", process_group=team)
        with pytest.raises(ValueError, match="not distributed"):
            bagua.stats(model)
        return str(error.value)

    threads = threading.active_count()
    for message in run_teams(2, refused):
        assert all(word in message for word in words), message
    assert threading.active_count() <= threads


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: QAdam(codec="nothing"), ("'nothing'",)),
        (lambda: QAdam(codec="bf16", error_feedback=True), ("error_feedback", "bf16")),
    ],
)
def test_bad_options_of_the_algorithm(make: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize("bits", [1, 2])
def test_an_unbiased_codec_follows_adam_too(bits: int) -> None:
    """Without error feedback the errors of 1 bit grow from step to step, since momenta are quantised again."""
    size, steps, options = 2, 240, {"lr": 0.01, "warmup_steps": 40}
    coarse, exact = (
        simulated(size, QAdam(codec=each), steps, lambda p: optimizer(p, **options))
        for each in (Eden(bits=bits), "identity")
    )
    assert all_equal(coarse)
    apart = np.linalg.norm(coarse[0][0][-60:] - exact[0][0][-60:], axis=1).mean()
    assert apart < 0.2 * np.linalg.norm(start()), apart


def test_feedback_is_on_by_default_below_8_bits() -> None:
    names = ("eden", "sign", "int4", "top_k:ratio=0.4", "minmax_uint8", "identity", "bf16")
    chosen = [fit_momentum_feedback(None, codecs.get(name)) for name in names]
    assert chosen == [True, True, True, True, False, False, False]
    assert not fit_momentum_feedback(False, Eden()) and fit_momentum_feedback(True, codecs.get("minmax_uint8"))

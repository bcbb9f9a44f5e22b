"""DiLoCo equals a numpy oracle of the papers; anchors are the same on all ranks at all times."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import torch

import bagua
from bagua.algorithms import Algorithm, DiLoCo, Warmup
from bagua.comm.team import Team
from tests.algorithms.quadratic import N, Quadratic, flat, start, target, targets
from tests.rank_threads import run_teams

STEPS, LR = 24, 0.1
TWO_BUCKETS = 8  # bytes: b and w each make a bucket
full = partial(  # pseudo-gradients as they are
    DiLoCo, codec="identity", outer_lr=0.7, outer_momentum=0.5, nesterov=True
)
PART = [np.arange(N) < 11, np.arange(N) >= 11]


def anchors_of(state: dict, name: str = "anchor") -> np.ndarray:
    """The tensors `name` of all buckets, in the order of x: b, then w."""
    found = {each["bucket"]: each["value"] for each in state["tensors"] if each["name"] == name}
    parts = {names[0]: found[index] for index, names in enumerate(state["plan"])}
    return torch.cat([parts["b"], parts["w"]] if len(parts) == 2 else [parts["b"]]).double().numpy()


def follow(
    team: Team,
    algorithm,
    steps: int = STEPS,
    bucket_bytes: int = TWO_BUCKETS,
    stop: int = 0,
    look: bool = True,
    dtype: torch.dtype = torch.float32,
) -> tuple[np.ndarray, np.ndarray, bagua.Stats]:
    """Weights and anchors after each step, and statistics; with `stop`: saved there and gone on with afresh."""

    def fresh():
        model = Quadratic().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=bucket_bytes)
        return model, optimizer

    model, optimizer = fresh()
    weights, anchors = [], []
    for step in range(steps):
        if stop and step == stop:
            saved, other_weights = bagua.state_dict(model), model.state_dict()
            other, optimizer = fresh()
            other.load_state_dict(other_weights)
            bagua.load_state_dict(other, saved)
            bagua.detach(model)
            model = other
        optimizer.zero_grad()
        model(torch.tensor(target(team.rank, step)).to(dtype)).backward()
        optimizer.step()
        weights.append(flat(model).detach().double().numpy().copy())
        if look:  # this waits for the round under way
            state = bagua.state_dict(model)
            if any(each["name"] == "anchor" for each in state["tensors"]):
                anchors.append(anchors_of(state))
    stats = bagua.stats(model)
    bagua.detach(model)
    return np.stack(weights), np.stack(anchors) if anchors else np.empty(0), stats


def oracle(size: int, algorithm: DiLoCo, begin: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Weights [steps, R, N] and anchors [steps, N]; a mean of all gradients before step `begin`."""
    h, parts = algorithm.communication_interval, algorithm.fragments
    mixing = algorithm.mixing if algorithm.mixing is not None else 0.5 if algorithm.delay else 0.0
    lr, mu = algorithm.outer_lr, algorithm.outer_momentum
    x = np.tile(start(), (size, 1))
    anchor, v = start(), np.zeros(N)
    under_way: list[tuple[int, np.ndarray, np.ndarray]] = []
    weights, anchors = [], []

    def apply(place: np.ndarray, d: np.ndarray) -> None:
        v[place] = mu * v[place] + d
        anchor[place] -= lr * (d + mu * v[place] if algorithm.nesterov else v[place])
        x[:, place] = (1 - mixing) * anchor[place] + mixing * x[:, place]

    for t in range(1, STEPS + 1):
        gradients = x - targets(size, t - 1)
        x = x - LR * (gradients.mean(0) if t <= begin else gradients)
        if t <= begin:
            anchor = x[0].copy()
        else:
            for due, place, d in list(under_way):
                if due == t:
                    apply(place, d)
            under_way = [each for each in under_way if each[0] > t]
            for f in range(parts):
                if t % h == (f + 1) * h // parts % h:
                    place = PART[f] if parts == 2 else np.ones(N, bool)
                    d = (anchor - x)[:, place].mean(0)
                    if algorithm.delay:
                        under_way.append((t + algorithm.delay, place, d))
                    else:
                        apply(place, d)
        weights.append(x.copy())
        anchors.append(anchor.copy())
    return np.stack(weights), np.stack(anchors)


VARIANTS = [
    full(communication_interval=4),
    full(communication_interval=1),
    full(communication_interval=4, outer_momentum=0.9),  # the paper's
    full(communication_interval=5, outer_lr=1.0, outer_momentum=0.0, nesterov=False),  # local SGD
    full(communication_interval=4, outer_lr=0.4, outer_momentum=0.5, nesterov=False),
    full(communication_interval=4, mixing=0.25),
    full(communication_interval=6, fragments=2),
    full(communication_interval=6, delay=2),
    full(communication_interval=6, delay=6, mixing=0.0),
    full(communication_interval=6, fragments=2, delay=1, mixing=0.0),
    full(communication_interval=6, fragments=2, delay=3, mixing=0.75),
    full(communication_interval=2, fragments=2, delay=1),
]


def check(results: list, algorithm: DiLoCo, begin: int = 0, tolerance: float = 2e-5) -> None:
    weights, anchors = oracle(len(results), algorithm, begin)
    for rank, (seen, kept, _) in enumerate(results):
        assert np.abs(seen - weights[:, rank]).max() < tolerance
        assert np.array_equal(kept, results[0][1]), "anchors differ"
        assert np.abs(kept - anchors[len(anchors) - len(kept) :]).max() < tolerance


@cache
def watched(size: int, algorithm: Algorithm) -> list:
    """`follow` on `size` ranks, of which several tests ask."""
    return run_teams(size, follow, algorithm)


@cache
def unwatched(size: int, algorithm: Algorithm) -> list:
    """The same, and nobody reads the state on the way."""
    return run_teams(size, partial(follow, look=False), algorithm)


@pytest.mark.parametrize(
    ("size", "algorithm"),
    [*((3, each) for each in VARIANTS), *((size, VARIANTS[at]) for size in (1, 2, 4, 8) for at in (0, 10))],
    ids=repr,
)
def test_is_the_papers(size: int, algorithm: DiLoCo) -> None:
    check(watched(size, algorithm), algorithm)


@pytest.mark.parametrize("algorithm", VARIANTS, ids=repr)
def test_nobody_needs_to_look(algorithm: DiLoCo) -> None:
    """Reading the state waits for the round under way; without it the same bits come out."""
    for a, b in zip(watched(3, algorithm), unwatched(3, algorithm), strict=True):
        assert np.array_equal(a[0], b[0])


def test_a_round_is_hidden_behind_the_delay() -> None:
    """Nothing is waited for before the delay is over."""
    for delay, launches in ((0, 1), (3, 1)):
        algorithm = full(communication_interval=6, delay=delay)
        run = partial(follow, steps=8, bucket_bytes=1 << 20, look=False)
        for _, _, stats in run_teams(2, run, algorithm):
            assert stats.total.launches == launches
            assert stats.last.launches == 1
            assert (stats.last.comm_s > 0) == (delay == 0), "waited for in the step that launched it"


@pytest.mark.parametrize(
    ("codec", "error_feedback", "delay", "size"),
    [
        ("bf16", False, 0, 2),
        ("bf16", False, 1, 3),
        ("minmax_uint8", False, 0, 3),
        ("minmax_uint8", False, 1, 4),
        ("minmax_uint8", True, 0, 4),
        ("minmax_uint8", True, 1, 2),
        ("int4", False, 0, 4),
        ("int4", False, 1, 2),
        ("int4", True, 0, 2),
        ("int4", True, 1, 3),
    ],
)
def test_codecs(size: int, codec: str, error_feedback: bool, delay: int) -> None:
    """Each round errs by two roundings of d at most; the outer optimizer passes on lr / (1 - mu) of them at most."""
    exact = full(communication_interval=4, delay=delay)
    algorithm = replace(exact, codec=codec, error_feedback=error_feedback)
    results = run_teams(size, follow, algorithm)
    weights, anchors = oracle(size, exact)
    assert all(np.array_equal(kept, results[0][1]) for _, kept, _ in results), "anchors differ"
    furthest = np.abs(anchors[:, None] - weights).max()
    step_size = {"bf16": 2**-7 * size / 2, "minmax_uint8": 2 / 255, "int4": 1 / 7}[codec]
    passed_on = exact.outer_lr / (1 - exact.outer_momentum)
    bound = 2 * furthest * step_size * passed_on * (2 if error_feedback else 1)
    worst = max(np.abs(seen - weights[:, rank]).max() for rank, (seen, _, _) in enumerate(results))
    assert 1e-5 < worst < bound


@pytest.mark.parametrize("codec", ["minmax_uint8", "int4"])
def test_error_feedback_helps(codec: str) -> None:
    def distance(error_feedback: bool) -> float:
        algorithm = DiLoCo(communication_interval=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False, codec=codec)
        seen = run_teams(2, follow, replace(algorithm, error_feedback=error_feedback))[0][0]
        exact = oracle(2, replace(algorithm, codec="identity"))[0][:, 0]
        return float(np.linalg.norm((seen - exact)[STEPS // 2 :]))

    assert distance(True) < distance(False)


@pytest.mark.parametrize("nodes", [[0, 0, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0]])
@pytest.mark.parametrize("delay", [0, 2])
def test_hierarchical(nodes: list[int], delay: int) -> None:
    algorithm = full(communication_interval=4, delay=delay, hierarchical=True)
    check(run_teams(len(nodes), follow, algorithm, nodes=nodes), algorithm)


@pytest.mark.parametrize("begin", [0, 1, 7, 8])
@pytest.mark.parametrize("delay", [0, 2])
def test_after_a_warmup(begin: int, delay: int) -> None:
    """A round that should have begun before the hand-over is not finished after it."""
    algorithm = full(communication_interval=4, delay=delay)
    results = run_teams(3, follow, Warmup(begin, "gradient_allreduce", algorithm))
    check(results, algorithm, begin)
    assert len(results[0][1]) == STEPS - max(begin - 1, 0), "anchors exist from the hand-over on"


@pytest.mark.parametrize(("stop", "size"), [(3, 3), (7, 3), (8, 3), (12, 3), (8, 1)])
@pytest.mark.parametrize(
    "algorithm",
    [
        full(communication_interval=6),
        full(communication_interval=6, fragments=2, delay=3),
        DiLoCo(communication_interval=6, delay=3, codec="minmax_uint8", error_feedback=True),
        Warmup(2, "gradient_allreduce", full(communication_interval=6, delay=4)),
    ],
    ids=repr,
)
def test_resume_is_bit_identical(size: int, stop: int, algorithm) -> None:
    """Steps 7 and 8 lie within a delay: the round under way is saved and applied when it is due."""
    resumed = run_teams(size, partial(follow, look=False, stop=stop), algorithm)
    for one, other in zip(unwatched(size, algorithm), resumed, strict=True):
        assert np.array_equal(one[0], other[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_weights_of_other_types(dtype: torch.dtype) -> None:
    """The outer state is fp32 at least; ranks agree on it."""
    algorithm = full(communication_interval=4)
    results = run_teams(3, partial(follow, dtype=dtype), algorithm)
    weights, anchors = oracle(3, algorithm)
    tolerance = {torch.bfloat16: 0.2, torch.float16: 0.03, torch.float64: 1e-6}[dtype]
    for rank, (seen, kept, _) in enumerate(results):
        assert np.array_equal(kept, results[0][1])
        assert np.abs(seen - weights[:, rank]).max() < tolerance
        assert np.abs(kept - anchors).max() < tolerance
    if dtype is not torch.float64:
        rounded = torch.tensor(results[0][1]).to(dtype).double().numpy()
        assert not np.array_equal(rounded, results[0][1]), "anchors were kept in 16 bits"


def test_bytes_per_step_are_what_available_says() -> None:
    options: dict
    for options in ({}, {"codec": "minmax_uint8"}, {"codec": "bf16"}, {"delay": 2}, {"fragments": 2}):
        algorithm = full(communication_interval=4, **options)
        parts = [N] if algorithm.fragments == 1 else [11, 35]
        want = sum(algorithm.bytes_per_rank(part, 4) for part in parts) * STEPS
        bucket_bytes = TWO_BUCKETS if algorithm.fragments == 2 else 1 << 20
        steps = STEPS + algorithm.delay  # the bytes of a round are counted where it ends
        for _, _, stats in run_teams(4, partial(follow, bucket_bytes=bucket_bytes), algorithm, steps):
            assert abs(stats.total.bytes_sent - want) <= STEPS


def test_fragments_take_turns() -> None:
    """Half of the bytes at a time, at even distances."""

    def moved(team: Team) -> list[tuple[bool, ...]]:
        _, anchors, _ = follow(team, full(communication_interval=6, fragments=2), 12)
        changed = np.diff(np.concatenate([start()[None].astype(np.float32), anchors]), axis=0) != 0
        return [tuple(bool(row[part].any()) for part in PART) for row in changed]

    want = [(step % 6 == 3, step % 6 == 0) for step in range(1, 13)]
    assert run_teams(2, moved) == [want, want]


def too_few_buckets(team: Team) -> str:
    model = Quadratic()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    algorithm = full(communication_interval=6, fragments=3)
    with pytest.raises(ValueError) as error:
        bagua.distribute(model, optimizer, algorithm, process_group=team, bucket_bytes=TWO_BUCKETS)
    return str(error.value)


def test_fewer_buckets_than_fragments_are_refused() -> None:
    for message in run_teams(2, too_few_buckets):
        assert "fragments=3" in message and "2 bucket" in message and "bucket_bytes" in message


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"communication_interval": 0}, ("communication_interval", "0")),
        ({"communication_interval": 2.5}, ("communication_interval", "2.5")),
        ({"communication_interval": True}, ("communication_interval", "True")),
        ({"communication_interval": 8, "fragments": 3}, ("fragments", "3", "communication_interval=8")),
        ({"fragments": 0}, ("fragments", "0")),
        ({"communication_interval": 8, "delay": 9}, ("delay", "8", "9")),
        ({"communication_interval": 8, "fragments": 2, "delay": 5}, ("delay", "4", "5")),
        ({"delay": -1}, ("delay", "-1")),
        ({"delay": 1.0}, ("delay", "1.0")),
        ({"outer_lr": 0.0}, ("outer_lr", "0")),
        ({"outer_lr": -1}, ("outer_lr", "-1")),
        ({"outer_lr": float("nan")}, ("outer_lr", "nan")),
        ({"outer_momentum": 1.0}, ("outer_momentum", "1.0")),
        ({"outer_momentum": "0.9"}, ("outer_momentum", "'0.9'")),
        ({"outer_momentum": 0.0, "nesterov": True}, ("nesterov", "outer_momentum")),
        ({"nesterov": 1}, ("nesterov", "1")),
        ({"mixing": 1.0}, ("mixing", "1.0")),
        ({"mixing": -0.1}, ("mixing", "-0.1")),
        ({"codec": "int3"}, ("int3", "int4")),
        ({"error_feedback": True, "codec": "identity"}, ("error_feedback", "identity")),
        ({"error_feedback": True, "codec": "bf16"}, ("error_feedback", "bf16")),
    ],
)
def test_bad_options(options: dict, words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as error:
        bagua.algorithms.get("diloco", **options)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_nodes_are_summed_first_by_default_where_ranks_would_share_a_link() -> None:
    """4 bits cannot be summed on the way, so each rank would send to all others."""
    for nodes, codec, hierarchical in (
        (((0, 1), (2,)), "int4", True),
        (((0, 1), (2,)), "bf16", False),
        (((0,), (1,)), "int4", False),
    ):
        fitted, remark = DiLoCo(codec=codec).for_nodes(nodes)
        assert isinstance(fitted, DiLoCo) and fitted.hierarchical is hierarchical and not remark

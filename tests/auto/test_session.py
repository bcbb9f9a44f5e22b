"""All ranks choose the same at the same step, and training goes on as with the setting named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import bagua
from bagua.algorithms import Auto, ByteGrad, GradientAllReduce
from bagua.algorithms.options import describe
from bagua.engine import glance
from bagua.engine.hooks import attachments
from tests.auto.training import FAST, compressed_is_fast, nothing_is_faster, pretend, until_settled
from tests.autotune.training import WIDTH, Training, engine_of, make_model
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams


def choose(team: Any, allow: str = "lossy", **options: Any) -> tuple[Any, str, str, Any, list[type]]:
    training = Training(team, "auto", allow=allow, **options)
    explained = until_settled(training)
    in_force = repr(engine_of(training).algorithm)
    kinds = [type(each) for each in engine_of(training).optimizers]
    return explained, in_force, bagua.stats(training.model).algorithm, training.steps(3).weights, kinds


def test_a_compressed_setting_is_chosen_by_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    (first, in_force, root, weights, kinds), *others = run_teams(3, choose)
    assert first.chosen == FAST
    assert in_force == repr(ByteGrad(hierarchical=False, codec="eden:bits=2", error_feedback=True))
    root, _, told = root.partition(": ")
    assert root == "Auto(allow='lossy', max_loss_gap=None, adapt=True)"
    assert told == describe(ByteGrad(hierarchical=False, codec="eden:bits=2", error_feedback=True))
    assert first.step < 40
    assert kinds == [torch.optim.SGD]
    for explained, same, _, equal, _ in others:
        assert explained == first
        assert same == in_force
        assert torch.equal(weights, equal)


def test_full_precision_stays_where_nothing_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, nothing_is_faster)
    for explained, in_force, *_ in run_teams(2, choose):
        assert explained.chosen == "gradient_allreduce"
        assert in_force == repr(GradientAllReduce(hierarchical=False))
        assert sum(row.measured_s is not None for row in explained.rows) == 4  # three were tried


def names(team: Any) -> list[str]:
    training = Training(team, "auto")
    told = [glance.describe([engine_of(training)])["algorithm"]]
    until_settled(training)
    told.append(glance.describe([engine_of(training)])["algorithm"])
    bagua.distribute(training.model, training.optimizer, "local_sgd", process_group=team)
    return [*told, glance.describe([engine_of(training)])["algorithm"]]


def test_observers_are_told_what_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    assert run_teams(2, names) == [["auto", "auto: bytegrad", "local_sgd"]] * 2


def weights_are_fast(name: str) -> float:
    gradients = name.startswith(("gradient_allreduce", "bytegrad", "power_sgd"))
    return 0.1 if name == "gradient_allreduce" else 0.05 if gradients else 0.02


def test_weights_are_averaged_when_settings_that_exchange_weights_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, weights_are_fast)
    (first, in_force, *_), (other, *_) = run_teams(2, choose, "asynchronous")
    assert first == other
    assert {row.name: row.kind for row in first.rows}[first.chosen] in ("periodic", "decentralized", "asynchronous")
    assert in_force.startswith(("LocalSGD", "DiLoCo", "Decentralized", "LowPrecision", "Async"))


def not_faster(name: str) -> float:
    return 0.1


def as_plain(team: Any) -> tuple[Any, Any]:
    """A choice of full precision, in which no setting was tried, trains as full precision that was named."""
    chosen = Training(team, "auto", allow="exact")
    until_settled(chosen)
    named = Training(team, "gradient_allreduce").steps(chosen.made)
    return chosen.steps(2).weights, named.steps(2).weights


def test_an_exact_choice_has_the_bits_of_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, not_faster)
    for chosen, named in run_teams(2, as_plain):
        assert torch.equal(chosen, named)


def resumed(team: Any) -> tuple[Any, Any, Any, Any]:
    training = Training(team, "auto")
    explained = until_settled(training)
    training.steps(2)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    saved = bagua.state_dict(training.model)
    again = Training(team, "auto")
    again.model.load_state_dict(weights)
    bagua.load_state_dict(again.model, saved)
    again.made = training.made
    assert bagua.explain(again.model) == explained
    assert repr(engine_of(again).algorithm) == repr(engine_of(training).algorithm)
    return training.steps(3).weights, again.steps(3).weights, explained, bagua.explain(again.model)


def test_a_settled_choice_is_resumed_with_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    for straight, again, before, after in run_teams(2, resumed):
        assert torch.equal(straight, again)
        assert before == after


def resumed_early(team: Any) -> tuple[str, Any]:
    training = Training(team, "auto").steps(9)
    assert bagua.explain(training.model).phase == "trying"
    saved = bagua.state_dict(training.model)
    again = Training(team, "auto")
    bagua.load_state_dict(again.model, saved)
    assert (bagua.explain(again.model).phase, bagua.explain(again.model).chosen) == ("waiting", "gradient_allreduce")
    assert engine_of(again).algorithm.name == "gradient_allreduce"
    return repr(engine_of(training).algorithm), until_settled(again)


def test_a_choice_that_was_not_made_yet_is_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    for trying, explained in run_teams(2, resumed_early):
        assert "GradientAllReduce(hierarchical=False, average=True, codec='identity'" not in trying
        assert explained.chosen == FAST


def other_options(team: Any) -> None:
    training = Training(team, "auto").steps(1)
    saved = bagua.state_dict(training.model)
    with pytest.raises(ValueError, match=r"saved with algorithm Auto\(allow='lossy'"):
        bagua.load_state_dict(Training(team, "auto", allow="exact").model, saved)


def test_a_state_of_other_options_is_refused() -> None:
    run_teams(2, other_options)


def accumulating(team: Any) -> Any:
    training = Training(team, "auto")
    while bagua.explain(training.model).phase != "settled":
        assert training.made < 40
        training.steps(1, passes=3)
    return bagua.explain(training.model), training.weights


def test_gradients_may_be_accumulated(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    (first, weights), (other, equal) = run_teams(2, accumulating)
    assert first == other
    assert torch.equal(weights, equal)


def scaled(team: Any, scaler: Any) -> Any:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, "auto", process_group=team, allow="decentralized")
    made = scaler("cpu")
    for _ in range(40):
        made.scale(model(torch.ones(2, WIDTH)).square().mean()).backward()
        made.step(optimizer)
        made.update()
        optimizer.zero_grad()
    return bagua.explain(model)


def test_with_torchs_scaler_gradients_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, weights_are_fast)
    for explained in run_teams(2, scaled, torch.amp.GradScaler):
        verdicts = {row.name: row.verdict for row in explained.rows}
        assert explained.phase == "settled"
        assert verdicts["decentralized"] == "steps with local gradients: needs bagua.GradScaler"
        assert {row.name: row.kind for row in explained.rows}[explained.chosen] in ("exact", "lossy")


def test_a_guard_that_falls_back_ends_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)

    def run(team: Any) -> Any:
        training = Training(team, "auto", guard=bagua.Guard(every=1, min_cosine=1.0)).steps(14)
        return bagua.explain(training.model), engine_of(training).algorithm.name

    for explained, name in run_teams(2, run):
        assert name == "gradient_allreduce"
        assert explained.phase == "settled"
        assert explained.reason == "another algorithm took over, from a guard"


def switched(team: Any) -> Any:
    training = Training(team, "auto").steps(8)
    bagua.distribute(training.model, training.optimizer, "bytegrad", process_group=team)
    training.steps(2)
    with pytest.raises(
        ValueError, match='module: Sequential is distributed with an algorithm that was named, not "auto"'
    ):
        bagua.explain(training.model)
    bagua.distribute(training.model, training.optimizer, "auto", process_group=team)
    assert bagua.explain(training.model).phase == "waiting"
    bagua.detach(training.model)
    with pytest.raises(ValueError, match="not distributed"):
        bagua.explain(training.model)


def test_switches_between_auto_and_named_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, compressed_is_fast)
    run_teams(2, switched)


def in_processes() -> tuple[Any, Any, str]:
    training = Training(None, "auto", rank=dist.get_rank())
    explained = until_settled(training)
    training.steps(2)
    return explained.as_dict(), training.weights, " ".join(bagua.stats(training.model).notices)


def test_real_ranks_measure_and_agree(pool: RankPool) -> None:
    """What is chosen depends on the machine; that all choose the same does not."""
    (first, weights, said), (other, equal, nothing) = pool.run(2, in_processes)
    assert first == other
    assert first["phase"] == "settled"
    assert first["links"]["within"]
    assert torch.equal(weights, equal)
    assert said.startswith(f"auto: {first['chosen']} from step {first['step']} on: ")
    assert nothing == ""


def wrong() -> list[str]:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    messages: list[str] = []
    for options, optimizers in (
        ({"allow": "fast"}, optimizer),
        ({"allow": None}, optimizer),
        ({"allow": ""}, optimizer),
        ({"max_loss_gap": -1.0}, optimizer),
        ({"max_loss_gap": "2 %"}, optimizer),
        ({"codec": "int4"}, optimizer),
        ({"autotune": True}, optimizer),
        ({}, []),
    ):
        with pytest.raises(ValueError, match=r"^[^\n]*$") as caught:
            bagua.distribute(model, optimizers, "auto", **options)
        messages.append(str(caught.value))
    assert model not in attachments
    if dist.get_rank():
        with pytest.raises(bagua.RankMismatchError, match="algorithm differs: rank 1 has Auto"):
            bagua.distribute(model, optimizer, "auto", allow="exact")
    else:
        with pytest.raises(bagua.RankMismatchError, match="algorithm differs: rank 1 has Auto"):
            bagua.distribute(model, optimizer, "auto")
    return messages


def test_wrong_arguments_are_named(pool: RankPool) -> None:
    expected = [
        "allow: expected one of exact, lossy, periodic, decentralized, asynchronous, got 'fast'",
        "algorithm 'auto', option 'allow': expected a str, got None",
        "allow: expected one of exact, lossy, periodic, decentralized, asynchronous, got ''",
        "max_loss_gap: expected a fraction >= 0 or None, got -1.0",
        "algorithm 'auto', option 'max_loss_gap': expected a float or None, got '2 %'",
        "algorithm 'auto' has no option 'codec'; it has: allow, max_loss_gap, adapt",
        'autotune: not with algorithm "auto" yet: each changes the steps that the other times; name an algorithm',
    ]
    for *named, last in pool.run(2, wrong):
        assert len(named) == len(expected)
        assert all(text.startswith(want) for text, want in zip(named, expected, strict=True)), named
        assert last.startswith('optimizers: "auto" measures steps, which end with theirs; pass them, or name an')


def alone(path: Path) -> tuple[str, bool]:
    training = Training(None, "auto").steps(1)
    first = bagua.explain(training.model)
    training.steps(2)
    bagua.checkpoint.save(path, {"model": training.model, "optimizer": training.optimizer}, step=3)
    resumed = Training(None, "auto")
    assert bagua.checkpoint.load(path, {"model": resumed.model, "optimizer": resumed.optimizer}) is not None
    training.steps(2)
    resumed.made = 3
    resumed.steps(2)
    assert (first.phase, first.links) == ("settled", None)
    return str(first), torch.equal(training.weights, resumed.weights)


def test_one_rank_trains_without_a_choice(pool: RankPool, tmp_path: Path) -> None:
    """So that a script can be tried alone, and elastic training can shrink to one rank."""
    ((said, equal),) = pool.run(1, alone, tmp_path)
    assert "gradient_allreduce" in said and "one rank has nobody to exchange with" in said
    assert equal
    size = pool.run(2, grown, tmp_path)
    assert size == [("waiting", 2)] * 2


def grown(path: Path) -> tuple[str, int]:
    training = Training(None, "auto", rank=dist.get_rank())
    assert bagua.checkpoint.load(path, {"model": training.model, "optimizer": training.optimizer}) is not None
    explained = bagua.explain(training.model)
    return explained.phase, explained.size


def test_simulated_ranks_have_no_links() -> None:
    with pytest.raises(ValueError, match='algorithm: "auto" measures links, and simulated ranks have none'):
        bagua.simulate(
            "auto",
            ranks=2,
            model=lambda: nn.Linear(4, 4),
            loss=lambda module, rank, step: module(torch.ones(1, 4)).sum(),
            steps=1,
        )


def test_an_instance_is_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, nothing_is_faster)

    def run(team: Any) -> Any:
        return until_settled(Training(team, Auto(allow="exact")))

    for explained in run_teams(2, run):
        assert explained.allow == "exact"
        assert [row.name for row in explained.rows] == ["gradient_allreduce"]

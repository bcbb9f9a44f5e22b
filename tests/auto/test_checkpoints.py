"""A checkpoint holds the choice; another number of ranks, or other nodes, choose anew."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import bagua
from bagua.auto.ranking import Ranking
from bagua.checkpoint import load, save
from tests.auto.training import FAST, compressed_is_fast, pretend, until_settled
from tests.autotune.training import Training, engine_of
from tests.rank_threads import run_teams


def objects(training: Training) -> dict[str, Any]:
    return {"model": training.model, "optimizer": training.optimizer}


def before(team: Any, path: Path) -> Any:
    training = Training(team, "auto")
    until_settled(training)
    training.steps(2)
    save(path, objects(training), step=training.made, process_group=team)
    return training.made, training.steps(3).weights


def after(team: Any, path: Path, made: int) -> Any:
    training = Training(team, "auto")
    assert load(path, objects(training), process_group=team, rng=False) is not None
    training.made = made
    loaded = bagua.explain(training.model).phase, engine_of(training).algorithm.name
    weights = training.steps(3).weights
    training.made = 0
    return loaded, weights, until_settled(training)


@pytest.mark.parametrize("size", [2, 3])
def test_the_choice_is_in_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    pretend(monkeypatch, compressed_is_fast)
    (made, weights), _ = run_teams(2, before, tmp_path / "saved")
    found = run_teams(size, after, tmp_path / "saved", made)
    for loaded, again, explained in found:
        assert loaded == (("settled", "bytegrad") if size == 2 else ("waiting", "gradient_allreduce"))
        assert explained.chosen == FAST
        assert explained.size == size
        assert torch.equal(again, weights if size == 2 else found[0][1])


HOSTS_OF_TWO = (0, 0, 1, 1)
SETTINGS = {
    "gradient_allreduce:hierarchical=True": "lossy",
    "bytegrad:codec=eden:bits=2": "lossy",
    "power_sgd:rank=4": "lossy",
    "diloco:communication_interval=3,delay=0,codec=eden:bits=3,outer_lr=1.0,outer_momentum=0.0": "periodic",
    "low_precision_decentralized:overlap=True": "decentralized",
}


def only_is_fast(monkeypatch: pytest.MonkeyPatch, setting: str) -> None:
    """Let `setting` alone be tried, if it is allowed, and be fast."""

    def promising(self: Ranking, bar_s: float, besides: int = 0) -> list[tuple[float, int]]:
        names = [each.name for each in self.facts.candidates]
        return [(0.02, names.index(setting))] if setting in names else []

    pretend(monkeypatch, lambda name: 0.02 if name == setting else 0.1)
    monkeypatch.setattr(Ranking, "promising", promising)


def make(team: Any, allow: str) -> Training:
    training = Training(team, "auto", allow=allow, max_loss_gap=0.5)
    training.optimizer.param_groups[0]["momentum"] = 0.9
    return training


def momenta(training: Training) -> torch.Tensor:
    state = training.optimizer.state
    return torch.cat([state[param]["momentum_buffer"].flatten() for param in training.model.parameters()])


def save_choice(team: Any, path: Path, allow: str) -> Any:
    training = make(team, allow)
    explained = until_settled(training)
    training.steps(-explained.step % 3 + 1)  # in the middle of a round
    save(path, objects(training), step=training.made, process_group=team)
    return explained.chosen, training.weights, momenta(training)


def load_choice(team: Any, path: Path, allow: str) -> Any:
    training = make(team, allow)
    loaded = load(path, objects(training), process_group=team, rng=False)
    assert loaded is not None
    assert bagua.stats(training.model).steps == loaded.step
    found = bagua.explain(training.model), engine_of(training).algorithm.name, training.weights, momenta(training)
    return *found, until_settled(training), training.weights


@pytest.mark.parametrize("setting", SETTINGS)
def test_other_nodes_choose_anew_with_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    only_is_fast(monkeypatch, setting)
    args = tmp_path / "saved", SETTINGS[setting]
    before = run_teams(4, save_choice, *args, nodes=HOSTS_OF_TWO)
    assert [chosen for chosen, *_ in before] == [setting] * 4
    weights, momentum = (torch.stack([rank[number] for rank in before]).mean(0) for number in (1, 2))
    if SETTINGS[setting] != "lossy":
        assert not torch.equal(before[0][1], before[1][1])
    for nodes in ((0, 0), (0, 0, 0, 0), (0, 1, 2)):
        found = run_teams(len(nodes), load_choice, *args, nodes=nodes)
        for explained, name, loaded, loaded_momentum, again, trained in found:
            assert (explained.phase, explained.chosen, name) == ("waiting", *["gradient_allreduce"] * 2)
            torch.testing.assert_close(loaded, weights)
            torch.testing.assert_close(loaded_momentum, momentum)
            assert torch.equal(loaded, found[0][2])
            assert torch.equal(loaded_momentum, found[0][3])
            assert again == found[0][4]
            assert again.size == len(nodes)
            assert again.chosen == (setting if "hierarchical" not in setting else "gradient_allreduce")
            assert SETTINGS[setting] != "lossy" or torch.equal(trained, found[0][5])
    for rank, (explained, _, loaded, loaded_momentum, *_) in enumerate(
        run_teams(4, load_choice, *args, nodes=HOSTS_OF_TWO)
    ):
        assert (explained.phase, explained.chosen) == ("settled", setting)
        assert torch.equal(loaded, before[rank][1])
        assert torch.equal(loaded_momentum, before[rank][2])

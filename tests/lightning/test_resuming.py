"""Checkpoints of a Trainer hold what every rank needs to go on; evaluation sees the model that they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install '.[lightning]'")

import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

import bagua
from bagua.comm.team import Team
from lightning_bagua.rank_state import KEY, put_back
from tests.engine.test_site_choice import EDEN, decide, prepare, steps
from tests.engine.test_site_trial import HOSTS
from tests.lightning.models import Regression, flat, loader, make, saved, trainer
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams

CASES: list[tuple[str, dict[str, Any], str]] = [
    ("bytegrad", {"codec": "int4", "hierarchical": False}, "momentum"),  # residuals
    ("qadam", {}, "qadam"),
    ("zero_one_adam", {}, "zero_one_adam"),  # weights differ between exchanges
    ("decentralized", {}, "momentum"),  # momenta differ
    ("low_precision_decentralized", {}, "momentum"),  # replicas of neighbours
    ("local_sgd", {"communication_interval": 3}, "momentum"),
]


def every_epoch(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)


def go_on(algorithm: str, options: dict[str, Any], kind: str, folder: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights after 4 epochs, in one run and in two."""
    settings: dict[str, Any] = {"max_epochs": 4, "enable_checkpointing": True}
    straight = make(kind)
    trainer(algorithm, options, callbacks=[every_epoch(f"{folder}/straight")], **settings).fit(straight, loader())
    resumed = make(kind, seed=99)
    again = trainer(algorithm, options, callbacks=[every_epoch(f"{folder}/resumed")], **settings)
    again.fit(resumed, loader(), ckpt_path=f"{folder}/straight/epoch=1.ckpt")
    assert again.global_step == 16
    return flat(straight), flat(resumed)


@pytest.mark.parametrize(("algorithm", "options", "kind"), CASES, ids=[case[0] for case in CASES])
def test_resumed_training_makes_the_same_weights(
    pool: RankPool, tmp_path: Path, algorithm: str, options: dict[str, Any], kind: str
) -> None:
    for straight, resumed in pool.run(2, go_on, algorithm, options, kind, str(tmp_path)):
        assert torch.equal(straight, resumed)


def test_the_state_matters(pool: RankPool, tmp_path: Path) -> None:
    """Without the algorithm's state the weights come out otherwise, so that the test above can fail."""
    path = str(tmp_path)
    (straight, _), _ = pool.run(2, go_on, *CASES[0], path)
    checkpoint = saved(tmp_path / "straight" / "epoch=1.ckpt")
    del checkpoint[KEY]
    torch.save(checkpoint, tmp_path / "without.ckpt")
    for weights in pool.run(2, from_file, *CASES[0], f"{path}/without.ckpt", 4):
        assert not torch.equal(weights, straight)


def from_file(algorithm: str, options: dict[str, Any], kind: str, path: str, epochs: int, devices: int = 2) -> Any:
    model = make(kind, seed=99)
    trainer(algorithm, options, devices=devices, max_epochs=epochs).fit(model, loader(), ckpt_path=path)
    return flat(model)


@pytest.mark.parametrize(("algorithm", "options", "kind"), [CASES[0], CASES[3]], ids=["residuals", "momenta"])
def test_another_number_of_ranks(
    pool: RankPool, tmp_path: Path, algorithm: str, options: dict[str, Any], kind: str
) -> None:
    pool.run(2, go_on, algorithm, options, kind, str(tmp_path))
    path = str(tmp_path / "straight" / "epoch=1.ckpt")
    (weights,) = pool.run(1, from_file, algorithm, options, kind, path, 2, 1)
    torch.testing.assert_close(weights, flat_of(saved(Path(path))), msg="nothing left to train")
    (trained,) = pool.run(1, from_file, algorithm, options, kind, path, 3, 1)
    assert not torch.equal(trained, weights) and torch.isfinite(trained).all()


def flat_of(checkpoint: dict[str, Any]) -> torch.Tensor:
    return torch.cat([value.reshape(-1) for value in checkpoint["state_dict"].values()])


def another_algorithm(path: str) -> list[str]:
    import logging

    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("bagua").addHandler(handler)
    from_file("gradient_allreduce", {}, "momentum", path, 3)
    logging.getLogger("bagua").removeHandler(handler)
    return texts


def test_another_algorithm_starts_anew_and_says_so(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, go_on, *CASES[0], str(tmp_path))
    texts, others = pool.run(2, another_algorithm, str(tmp_path / "straight" / "epoch=1.ckpt"))
    assert any("made with ByteGrad" in text and "GradientAllReduce" in text for text in texts), texts
    assert not others


def state_of(team: Team) -> dict[str, Any]:
    model, optimizer = prepare(team, "bytegrad", EDEN)
    steps(team, model, optimizer, range(2))
    state = bagua.state_dict(model)
    bagua.detach(model)
    return state


@pytest.mark.parametrize("hosts", [HOSTS, ["a:0", "a:1", "b:2", "b:3", "c:4", "c:5"]], ids=["as_many", "more"])
def test_the_choice_of_a_trial_between_sites_goes_on(hosts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    decide(monkeypatch, flat_wins=True)
    states = run_teams(4, state_of, nodes=HOSTS)
    begun = decide(monkeypatch, flat_wins=False)
    item = {"owners": list(range(4)), "copies": dict(enumerate(states))}
    entry = {"version": 1, "size": 4, "items": {"algorithm": item}}

    def load(team: Team) -> tuple[str | None, str, int]:
        model, optimizer = prepare(team, "bytegrad", EDEN)
        remark = put_back(entry, model, [optimizer], team)
        steps(team, model, optimizer, range(2, 3))
        stats = bagua.stats(model)
        bagua.detach(model)
        return remark, stats.algorithm, stats.steps

    for remark, algorithm, count in run_teams(len(hosts), load, nodes=hosts):
        assert remark is None and "hierarchical=False" in algorithm and count == 3
    assert not begun, "the checkpoint decides instead of a trial"


class Paused(Regression):
    """Notes whether the engine rests while it is evaluated."""

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        from bagua.engine.hooks import attachments

        if self in attachments:
            self.paused.append(attachments[self].engine.state.paused)
        super().validation_step(batch, batch_idx)


def asynchronous(folder: str) -> Any:
    torch.manual_seed(dist.get_rank())
    model = Paused()
    made = trainer(
        "async",
        {"sync_interval_ms": 1},
        max_epochs=3,
        enable_checkpointing=True,
        callbacks=[every_epoch(folder)],
        num_sanity_val_steps=1,
    )
    made.fit(model, loader(), loader(8))
    made.save_checkpoint(f"{folder}/after.ckpt")
    metrics = made.validate(model, loader(8), verbose=False)
    return flat(model), model.validated, model.paused, metrics[0]["val_loss"]


def test_async_evaluates_and_saves_the_mean(pool: RankPool, tmp_path: Path) -> None:
    (one, seen, paused, loss), (other, others, _, other_loss) = pool.run(2, asynchronous, str(tmp_path))
    torch.testing.assert_close(one, other)
    assert loss == other_loss
    assert all(paused) and len(paused) == 1 + 3 * 2
    for mine, theirs in zip(seen, others, strict=True):
        torch.testing.assert_close(mine, theirs)
    for epoch in range(3):
        weights = flat_of(saved(tmp_path / f"epoch={epoch}.ckpt"))
        torch.testing.assert_close(weights, seen[1 + 2 * epoch])
    after = saved(tmp_path / "after.ckpt")
    torch.testing.assert_close(flat_of(after), one)
    assert after[KEY]["size"] == 2 and after[KEY]["items"]["algorithm"]["copies"].keys() == {0, 1}


def weights_only(folder: str) -> None:
    callback = ModelCheckpoint(folder, filename="weights", save_weights_only=True)
    trainer("bytegrad", callbacks=[callback], enable_checkpointing=True).fit(make(), loader())


def test_weights_alone(pool: RankPool, tmp_path: Path) -> None:
    pool.run(2, weights_only, str(tmp_path))
    assert KEY not in saved(tmp_path / "weights.ckpt")


class Breaks(Regression):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("on purpose")
        return super().training_step(batch, batch_idx)


def breaks() -> bool:
    torch.manual_seed(0)
    model = Breaks()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        trainer("decentralized").fit(model, loader())
    with pytest.raises(ValueError, match="not distributed"):
        bagua.stats(model)
    return True


def test_an_exception_comes_through_and_leaves_a_plain_module(pool: RankPool) -> None:
    assert pool.run(2, breaks) == [True, True]

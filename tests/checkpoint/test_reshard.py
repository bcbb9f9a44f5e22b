"""What R ranks saved, loaded by another number of ranks: kept where the maths allows, else refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import bagua
from bagua.checkpoint import CheckpointError, Shards, load, save
from bagua.checkpoint.reshard import equal, mean
from bagua.comm.team import Team
from bagua.engine.distributed_module import attachment_of
from bagua.exchanges import AllReduce
from tests.checkpoint.runs import Case, Run, cases
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams

STOP = 5
REPLICAS_EQUAL = ["feedback", "feedback_sum", "qadam_sign", "one_bit_lamb", "power_sgd_1", "bytegrad", "warmup_after"]
REPLICAS_DIFFER = ["overlap", "low_precision_decentralized", "gossip", "local_sgd", "delayed", "delayed_pending"]


def before(team: Team, case: Case, path: Path) -> dict[str, Any]:
    run = Run.start(case, team)
    run.train(range(case.stop), team.rank)
    run.settle()
    save(path, run.objects, step=case.stop, process_group=team)
    state = torch_copy(run.state())
    bagua.detach(run.model)
    return state


def after(team: Team, case: Case, path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state as it was loaded, and three steps later."""
    run = Run.start(case, team)
    run.settle()
    assert load(path, run.objects, process_group=team, rng=False) is not None
    loaded = torch_copy(run.state())
    run.train(range(case.stop, case.stop + 3), team.rank)
    later = run.state()
    bagua.detach(run.model)
    return loaded, later


def torch_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: torch_copy(item) for key, item in value.items()}
    return [torch_copy(item) for item in value] if isinstance(value, list | tuple) else value


def change(
    case: Case, old: int, new: int, path: Path, nodes: Any = (None, None)
) -> tuple[list[Any], list[Any], list[Any]]:
    """States by rank: as saved, as loaded, and three steps later."""
    saved = run_teams(old, before, case, path, nodes=nodes[0])
    loaded, later = zip(*run_teams(new, after, case, path, nodes=nodes[1]), strict=True)
    return saved, list(loaded), list(later)


def parts(states: list[Any], name: str) -> dict[tuple[int, int], list[Tensor]]:
    """The tensors called `name`, by bucket and part, of the ranks that have one."""
    found: dict[tuple[int, int], list[Tensor]] = {}
    for state in states:
        for entry in state["algorithm"]["states"]:
            if name in entry["tensors"]:
                found.setdefault((entry["bucket"], entry["part"]), []).append(entry["tensors"][name])
    return found


def weights_equal_the_mean(saved: list[Any], loaded: list[Any]) -> None:
    for name in ("first.weight", "last.weight", "tied.weight"):
        want = torch.stack([state["model"][name].double() for state in saved]).mean(0).float()
        assert all(torch.equal(state["model"][name], want) for state in loaded), name


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), pytest.param((4, 3), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["feedback", "qadam_sign", "power_sgd_1"])
def test_what_is_owed_to_the_mean_stays_the_same(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    saved, loaded, later = change(cases()[name], *sizes, tmp_path)
    what = "error" if name == "power_sgd_1" else "residual"
    old, new = parts(saved, what), parts(loaded, what)
    assert old.keys() == new.keys() and len(old) > 1
    chunks, recut = parts(saved, "chunk_residual"), parts(loaded, "chunk_residual")
    assert name == "power_sgd_1" or (bool(chunks), bool(recut)) == (sizes[0] > 2, sizes[1] > 2)
    for key, residuals in old.items():
        assert len(residuals) == sizes[0] and len(new[key]) == sizes[1]
        want = torch.stack([each.double() for each in residuals]).mean(0)
        if chunks and not recut:  # the ranks owe what the owners did
            want += torch.cat(chunks[key])[: want.numel()].view_as(want)
        got = torch.stack([each.double() for each in new[key]]).mean(0)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-7)
    assert any(residuals[0].any() for residuals in old.values())
    for key, pieces in chunks.items() if recut else ():
        n = old[key][0].numel()
        assert torch.equal(torch.cat(pieces)[:n], torch.cat(recut[key])[:n])
    assert all(equal(state["algorithm"]["step"], STOP) for state in loaded)
    assert equal(loaded[0]["optimizer"], saved[0]["optimizer"])
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


def test_what_is_owed_to_a_sum_stays_the_same(tmp_path: Path) -> None:
    saved, loaded, _ = change(cases()["feedback_sum"], 3, 2, tmp_path)
    new, chunks = parts(loaded, "residual"), parts(saved, "chunk_residual")
    for key, residuals in parts(saved, "residual").items():
        owed = torch.cat(chunks[key])[: residuals[0].numel()].view_as(residuals[0])
        torch.testing.assert_close(sum(new[key]), sum(residuals) + owed, rtol=1e-5, atol=1e-6)


def test_running_scales_are_kept(tmp_path: Path) -> None:
    case = Case(bagua.algorithms.ByteGrad(codec="eden", running_scale=True))
    saved, loaded, later = change(case, 3, 2, tmp_path)
    old, new = parts(saved, "magnitude"), parts(loaded, "magnitude")
    assert old and any(copies[0].any() for copies in old.values())
    for key, copies in old.items():
        assert len(copies) == 3 and len(new[key]) == 2
        assert all(torch.equal(each, copies[0]) for each in [*copies, *new[key]])
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


def test_leaders_hold_the_residuals_of_a_hierarchy(tmp_path: Path) -> None:
    case = Case(bagua.algorithms.ByteGrad(codec="int4", hierarchical=True))
    saved, loaded, later = change(case, 3, 5, tmp_path, ([0, 0, 1], [0, 0, 1, 1, 2]))
    old, new = parts(saved, "residual"), parts(loaded, "residual")
    for key, residuals in old.items():
        assert len(residuals) == 2 and len(new[key]) == 3
        torch.testing.assert_close(sum(new[key]) / 3, sum(residuals) / 2, rtol=1e-5, atol=1e-7)
    assert [bool(state["algorithm"]["states"]) for state in loaded] == [True, False, True, False, True]
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


@pytest.mark.parametrize("sizes", [(2, 3), pytest.param((3, 2), marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", REPLICAS_DIFFER)
def test_replicas_become_their_mean(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    saved, loaded, later = change(cases()[name], *sizes, tmp_path)
    assert not torch.equal(saved[0]["model"]["first.weight"], saved[1]["model"]["first.weight"])
    weights_equal_the_mean(saved, loaded)
    assert all(torch.isfinite(state["model"]["first.weight"]).all() for state in later)
    for key, mine in parts(loaded, "me").items():
        replicas = parts(loaded, "peers")[key]
        assert all(torch.equal(x, mine[0]) for x in mine)
        assert all(torch.equal(row, mine[0]) for peers in replicas for row in peers)
    for key, mine in parts(later, "me").items():  # on a ring of two and three, a rank's peers are all others
        for rank, peers in enumerate(parts(later, "peers")[key]):
            others = [x for other, x in enumerate(mine) if other != rank]
            assert all(any(torch.equal(row, x) for x in others) for row in peers)
    if name.startswith("delayed"):
        anchors = [{e["bucket"]: e["value"] for e in s["algorithm"]["tensors"] if e["name"] == "anchor"} for s in saved]
        kept = [{e["bucket"]: e["value"] for e in s["algorithm"]["tensors"] if e["name"] == "anchor"} for s in loaded]
        assert anchors[0] and all(equal(each, anchors[0]) for each in (*anchors, *kept))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


@pytest.mark.parametrize(
    "algorithm",
    [
        bagua.algorithms.Decentralized(mean_moments=True),
        bagua.algorithms.Decentralized(topology="ring", scale_second_moment=True),
        bagua.algorithms.LowPrecisionDecentralized(scale_second_moment=True),
        bagua.algorithms.LocalSGD(communication_interval=3, scale_second_moment=True),
        bagua.algorithms.DiLoCo(communication_interval=3, scale_second_moment=True),
        bagua.algorithms.LocalSGD(communication_interval=2, mean_moments=True),
        bagua.algorithms.LocalSGD(communication_interval=4, codec="minmax_uint8"),
        bagua.algorithms.DiLoCo(),
    ],
    ids=["mean_moments", "ring", "low_precision", "local_sgd", "diloco", "averages", "changes", "outer_steps"],
)
def test_corrected_moments_are_averaged(algorithm: Any, tmp_path: Path) -> None:
    saved, loaded, later = change(Case(algorithm, adamw, stop=9), 3, 2, tmp_path)
    weights_equal_the_mean(saved, loaded)
    for index, slot in loaded[0]["optimizer"]["state"].items():
        want = sum(state["optimizer"]["state"][index]["exp_avg_sq"].double() for state in saved) / 3
        torch.testing.assert_close(slot["exp_avg_sq"].double(), want, rtol=0, atol=1e-9)
    assert all(torch.isfinite(state["model"]["first.weight"]).all() for state in later)


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("algorithm", [bagua.algorithms.LocalSGD(), bagua.algorithms.DiLoCo()], ids=["local", "diloco"])
def test_rounds_go_on_alone_and_together(algorithm: Any, sizes: tuple[int, int], tmp_path: Path) -> None:
    """Nothing is inferred on one rank, so tensors of rounds are there on several only."""
    saved, loaded, later = change(Case(algorithm, adamw, stop=9), *sizes, tmp_path)
    weights_equal_the_mean(saved, loaded)
    assert all(torch.isfinite(state["model"]["first.weight"]).all() for state in later)


@pytest.mark.parametrize("sizes", [(4, 2), (2, 4), (2, 1)])
@pytest.mark.parametrize(
    "algorithm",
    [bagua.algorithms.LowPrecisionDecentralized(), bagua.algorithms.Decentralized(gradient_interval=2)],
    ids=["low_precision", "decentralized"],
)
def test_samples_of_mean_gradients_start_anew(algorithm: Any, sizes: tuple[int, int], tmp_path: Path) -> None:
    saved, loaded, later = change(Case(algorithm, adamw, stop=9), *sizes, tmp_path)
    weights_equal_the_mean(saved, loaded)

    def samples(state: dict[str, Any]) -> list[Tensor]:
        return [entry["value"] for entry in state["algorithm"]["tensors"] if entry["name"] == "squares"]

    assert any(not equal(samples(state), samples(saved[0])) for state in saved), "all ranks have seen the same"
    assert not any(each.any() for state in loaded for each in samples(state))
    assert sizes[1] == 1 or all(samples(state) for state in later)
    assert all(torch.isfinite(state["model"]["first.weight"]).all() for state in later)


def test_local_steps_of_zero_one_adam_are_averaged(tmp_path: Path) -> None:
    case = cases()["zero_one_adam"]
    saved, loaded, later = change(case, 3, 2, tmp_path)
    weights_equal_the_mean(saved, loaded)
    for index, slot in loaded[0]["optimizer"]["state"].items():
        if "drift" in slot:
            want = sum(state["optimizer"]["state"][index]["drift"].double() for state in saved) / 3
            torch.testing.assert_close(slot["drift"].double(), want, rtol=0, atol=1e-7)
    assert any("drift" in slot for slot in saved[0]["optimizer"]["state"].values()), "not within an interval"
    assert torch.isfinite(later[0]["model"]["first.weight"]).all()


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
@pytest.mark.parametrize("name", ["overlap", "feedback"])
def test_to_one_rank_and_from_one(name: str, sizes: tuple[int, int], tmp_path: Path) -> None:
    saved, loaded, later = change(cases()[name], *sizes, tmp_path)
    weights_equal_the_mean(saved, loaded)
    for key, mine in parts(loaded, "me").items():
        assert all(torch.equal(x, mine[0]) for x in mine) and all(
            torch.equal(row, mine[0]) for peers in parts(loaded, "peers")[key] for row in peers
        )
    assert torch.isfinite(later[-1]["model"]["first.weight"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*cases()} - {*REPLICAS_EQUAL, *REPLICAS_DIFFER}))
def test_every_other_algorithm_goes_on(name: str, tmp_path: Path) -> None:
    _, loaded, later = change(cases()[name], 2, 4, tmp_path)
    assert all(torch.isfinite(state["model"]["first.weight"]).all() for state in later)
    assert all(torch.equal(s["model"]["first.weight"], loaded[0]["model"]["first.weight"]) for s in loaded)


# -- what cannot be kept -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counting(AllReduce):
    """Remembers something of its own."""

    def init(self, x_N: Tensor, groups: Any) -> dict[str, Tensor]:
        return {"secret": torch.full((3,), float(groups.rank))}


@dataclass(frozen=True)
class Told(Counting):
    """Says what it means."""

    resharding: ClassVar[dict[str, str]] = {"secret": "mean"}


@dataclass(frozen=True)
class Mistold(Counting):
    """Says nonsense."""

    resharding: ClassVar[dict[str, str]] = {"secret": "guess"}


@dataclass(frozen=True)
class Own(bagua.algorithms.GradientAllReduce):
    """Runs one of these."""

    kind: type = Counting

    @property
    def exchange(self) -> Any:  # type: ignore[override]
        return self.kind()


def refused(team: Team, case: Case, path: Path) -> str:
    try:
        after(team, case, path)
    except (CheckpointError, ValueError) as error:
        return str(error)
    return ""


def test_an_unknown_state_is_refused_by_name(tmp_path: Path) -> None:
    run_teams(2, before, Case(Own(kind=Counting)), tmp_path)
    for said in run_teams(3, refused, Case(Own(kind=Counting)), tmp_path):
        assert "'secret' of all_reduce differs between the 2 ranks" in said and "model" in said
    assert run_teams(2, refused, Case(Own(kind=Counting)), tmp_path) == ["", ""], "as many ranks as before"


def test_a_class_may_say_what_becomes_of_its_state(tmp_path: Path) -> None:
    _, loaded, _ = change(Case(Own(kind=Told)), 2, 3, tmp_path / "told")
    assert all((each == 0.5).all() for tensors in parts(loaded, "secret").values() for each in tensors)
    run_teams(2, before, Case(Own(kind=Mistold)), tmp_path / "mistold")
    for said in run_teams(3, refused, Case(Own(kind=Mistold)), tmp_path / "mistold"):
        assert "Mistold.resharding['secret']: 'guess' is not a rule" in said


def test_another_algorithm_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    run_teams(2, before, cases()["feedback"], tmp_path)

    def other(team: Team) -> tuple[str, bool]:
        run = Run.start(cases()["bytegrad"], team)
        weights = torch_copy(run.model.state_dict())
        with pytest.raises(CheckpointError, match="saved with algorithm .*int4.*into algorithm .*minmax") as caught:
            load(tmp_path, run.objects, process_group=team)
        assert isinstance(caught.value, ValueError)
        untouched = equal(torch_copy(run.model.state_dict()), weights)
        bagua.detach(run.model)
        return str(caught.value), untouched

    for said, untouched in run_teams(2, other):
        assert untouched and ": model: saved" in said and "load the weights before bagua.distribute()" in said


def test_what_an_algorithm_refuses_is_an_error_of_the_checkpoint(tmp_path: Path) -> None:
    run_teams(2, before, cases()["feedback"], tmp_path)

    def other(team: Team) -> None:
        run = Run.start(cases()["feedback"], team)
        engine = attachment_of(run.model).engine
        with mock.patch.object(engine, "load_state_dict", side_effect=ValueError("state dict: of others")):
            with pytest.raises(CheckpointError, match=": model: state dict: of others") as caught:
                load(tmp_path, run.objects, process_group=team)
        assert isinstance(caught.value, ValueError)
        bagua.detach(run.model)

    run_teams(2, other)


def test_data_that_differ_by_rank_are_refused_by_name(tmp_path: Path) -> None:
    def write(team: Team) -> None:
        save(tmp_path, {"same": 1, "position": team.rank}, step=1, process_group=team)

    def read(team: Team) -> str:
        with pytest.raises(CheckpointError, match="'position' of rank 1 differs") as caught:
            load(tmp_path, {}, process_group=team)
        return str(caught.value)

    run_teams(2, write)
    assert all(run_teams(3, read))


def test_before_distribute_any_algorithm_may_follow(tmp_path: Path) -> None:
    """A plain module takes the weights; what `distribute` starts then is new."""
    saved = run_teams(2, before, cases()["overlap"], tmp_path)
    from tests.checkpoint.runs import Model

    plain = Model()
    load(tmp_path, {"model": plain}, rng=False)
    weights_equal_the_mean(saved, [{"model": plain.state_dict()}])


def test_a_module_that_was_not_distributed_has_no_state_of_an_algorithm(tmp_path: Path) -> None:
    from tests.checkpoint.runs import Model

    save(tmp_path, {"model": Model()}, step=1)

    def read(team: Team) -> None:
        run = Run.start(cases()["diloco"], team)
        with pytest.raises(CheckpointError, match="load it before bagua.distribute"):
            load(tmp_path, {"model": run.model}, process_group=team)
        bagua.detach(run.model)

    run_teams(1, read)


def test_the_mean_of_equal_tensors_is_the_tensor() -> None:
    x = torch.tensor([0.1, 1e30, -1e-30, float("nan"), float("inf")])
    assert equal(mean([x, x.clone(), x.clone()]), x)
    assert torch.equal(mean([torch.tensor([1, 2]), torch.tensor([3, 4])]), torch.tensor([1, 2]))


# -- through torch.distributed.checkpoint --------------------------------------------------------------------------


def write_shards(name: str, path: str) -> dict[str, Any]:
    run = Run.start(cases()[name])
    run.train(range(STOP))
    dcp.save({"a": Shards({"model": run.model, "optimizer": run.optimizer, "epoch": 3})}, checkpoint_id=path)
    state = torch_copy(run.state())
    bagua.detach(run.model)
    return state


def read_shards(name: str, path: str) -> dict[str, Any]:
    run = Run.start(cases()[name])
    shards = Shards({"model": run.model, "optimizer": run.optimizer}, reading=path)
    dcp.load({"a": shards}, checkpoint_id=path)
    assert shards.data == {"epoch": 3}
    state = torch_copy(run.state())
    bagua.detach(run.model)
    return state


def empty_place(path: str) -> str:
    dcp.save({"x": torch.ones(2)}, checkpoint_id=path)
    with pytest.raises(CheckpointError, match="nothing in it was saved by") as caught:
        Shards({"epoch": 0}, reading=path).state_dict()
    return str(caught.value)


@pytest.mark.parametrize(("name", "sizes"), [("feedback", (2, 3)), ("overlap", (3, 2))])
def test_shards_for_another_number_of_ranks(name: str, sizes: tuple[int, int], pool: RankPool, tmp_path: Path) -> None:
    saved = pool.run(sizes[0], write_shards, name, str(tmp_path / "dcp"))
    loaded = pool.run(sizes[1], read_shards, name, str(tmp_path / "dcp"))
    weights_equal_the_mean(saved, loaded)
    for key, residuals in parts(saved, "residual").items():
        got = torch.stack(parts(loaded, "residual")[key]).mean(0)
        torch.testing.assert_close(got, torch.stack(residuals).mean(0), rtol=1e-5, atol=1e-7)
    assert all(state["algorithm"]["size"] == sizes[1] for state in loaded)


def test_shards_where_there_are_none(pool: RankPool, tmp_path: Path) -> None:
    assert pool.run(1, empty_place, str(tmp_path / "dcp"))

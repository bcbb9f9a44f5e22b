"""State of sites whose hosts exchange a share each: kept, put together for other sites, refused for unlike ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import bagua
from bagua.checkpoint import CheckpointError, load, reshard
from bagua.checkpoint.reshard import equal
from bagua.comm.team import Team
from tests.checkpoint.runs import Case, Run
from tests.checkpoint.test_gathered_state import go_on
from tests.checkpoint.test_reshard import before, change
from tests.rank_threads import run_teams

TWO_SITES = ["a:0", "a:1", "b:2", "b:3"]
THREE_SITES = ["a:0", "a:1", "b:2", "b:3", "c:4", "c:5"]
MIXED = ["a:0", "b:1", "c:2", "c:3", "b:4", "a:5"]  # second hosts in another order than first ones
UNLIKE = ["a:0", "a:1", "a:2", "b:3"]
LAYOUTS: dict[str, Any] = {
    "two sites": TWO_SITES,
    "three sites": THREE_SITES,
    "mixed": MIXED,
    "unlike sites": UNLIKE,
    "hosts": [0, 0, 1],
}
SHARED = ("two sites", "three sites", "mixed")
FEEDBACK = Case(bagua.algorithms.ByteGrad(codec="int4", hierarchical=True))
SCALED = Case(bagua.algorithms.ByteGrad(codec="eden", running_scale=True, hierarchical=True))


def whole(states: list[Any], name: str) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """By bucket and part: the mean of residuals, or the magnitudes, and what owners of chunks owe, of all elements."""
    found: dict[tuple[int, int], dict[tuple[int, ...], list[dict[str, Tensor]]]] = {}
    for state in states:
        for entry in state["algorithm"]["states"]:
            share = tuple(entry["tensors"].get("share", torch.zeros(4, dtype=torch.int64)).tolist()[:3])
            found.setdefault((entry["bucket"], entry["part"]), {}).setdefault(share, []).append(entry["tensors"])
    joined = {}
    for key, shares in found.items():
        means, owed = [], []
        for share in sorted(shares, key=lambda share: share[2]):
            shares[share].sort(key=lambda each: int(each["share"][3]) if "share" in each else 0)
            tensors = torch.stack([each[name].double() for each in shares[share]])
            means.append(tensors.mean(0))
            chunks = [each["chunk_residual"].double() for each in shares[share] if "chunk_residual" in each]
            owed.append(torch.cat(chunks)[: tensors.shape[1]] if chunks else torch.zeros(tensors.shape[1]))
        joined[key] = torch.cat(means), torch.cat(owed)
    return joined


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("two sites", "three sites"),
        ("three sites", "two sites"),
        ("mixed", "two sites"),
        ("hosts", "mixed"),
        ("three sites", "unlike sites"),
        ("two sites", "hosts"),
        ("hosts", "two sites"),
        ("hosts", "three sites"),
    ],
)
def test_what_is_owed_to_the_mean_stays_the_same(old: str, new: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[old], LAYOUTS[new]
    saved, loaded, later = change(FEEDBACK, len(nodes[0]), len(nodes[1]), tmp_path, nodes)
    shares = [
        any("share" in entry["tensors"] for entry in states[0]["algorithm"]["states"]) for states in (saved, loaded)
    ]
    assert shares == [old in SHARED, new in SHARED]
    before_, after_ = whole(saved, "residual"), whole(loaded, "residual")
    assert before_.keys() == after_.keys() and len(before_) > 1
    for key, (means, owed) in before_.items():
        torch.testing.assert_close(sum(after_[key]), means + owed, rtol=1e-5, atol=1e-7)
    assert any(means.any() for means, _ in before_.values())
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)


@pytest.mark.parametrize(("old", "new"), [("two sites", "three sites"), ("three sites", "hosts")])
def test_running_scales_are_kept(old: str, new: str, tmp_path: Path) -> None:
    nodes = LAYOUTS[old], LAYOUTS[new]
    saved, loaded, _ = change(SCALED, len(nodes[0]), len(nodes[1]), tmp_path, nodes)
    for (mine, _), (theirs, _) in zip(
        whole(saved, "magnitude").values(), whole(loaded, "magnitude").values(), strict=True
    ):
        assert mine.any()
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("nodes", [TWO_SITES, THREE_SITES, MIXED])
def test_the_same_sites_go_on_as_if_never_stopped(nodes: list[str], tmp_path: Path) -> None:
    saved, loaded, later = change(FEEDBACK, len(nodes), len(nodes), tmp_path, (nodes, nodes))
    for mine, theirs in zip(saved, loaded, strict=True):
        assert equal(mine["algorithm"]["states"], theirs["algorithm"]["states"])
    assert all(torch.equal(state["model"]["inner.weight"], later[0]["model"]["inner.weight"]) for state in later)
    stopped, expected = zip(*run_teams(len(nodes), go_on, None, FEEDBACK, nodes=nodes), strict=True)
    assert all("share" in entry["tensors"] for state in stopped for entry in state["states"])
    again = [state for _, state in run_teams(len(nodes), go_on, list(stopped), FEEDBACK, nodes=nodes)]
    assert all(equal(mine, theirs) for mine, theirs in zip(again, expected, strict=True))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (TWO_SITES, ["a:0", "b:1", "a:2", "b:3"]),
        (MIXED, ["a:0", "b:1", "c:2", "a:3", "b:4", "c:5"]),
        (["a:0", "a:0", "b:1", "b:1"], TWO_SITES),
    ],
)
def test_ranks_at_other_sites_are_refused(old: list[str], new: list[str], tmp_path: Path) -> None:
    def refused(team: Team) -> str:
        run = Run.start(FEEDBACK, team)
        try:
            load(tmp_path, run.objects, process_group=team, rng=False)
        except (CheckpointError, ValueError) as error:
            return str(error)
        return "loaded"

    run_teams(len(old), before, FEEDBACK, tmp_path, nodes=old)
    said = run_teams(len(old), refused, nodes=new)
    assert all("the ranks were at other sites" in each for each in said), said


def test_payloads_that_are_smaller_than_the_shares_of_two_hosts() -> None:
    """Some hosts have empty shares then, all of them alike but for their places."""
    ends = [(0, 16), (16, 16), (16, 16)]
    old = [
        {"share": torch.tensor([*ends[place], place, site]), "residual": torch.full((0 if place else 16,), 1.0 + site)}
        for site in range(2)
        for place in range(3)
    ]
    shares = reshard._by_share(old, 16)
    assert [(lo, hi, len(having)) for lo, hi, having in shares] == [(*end, 2) for end in ends]
    assert [each.tolist() for each in reshard._joined(shares, "residual")] == [[1.0] * 16, [2.0] * 16]
    assert reshard._owed(shares) is None
    for each in old:
        each["chunk_residual"] = torch.full((16 if each["residual"].numel() else 0,), each["residual"].sum().item())
    owed = reshard._owed(reshard._by_share(old, 16))
    assert owed is not None and owed.tolist() == [16.0] * 16

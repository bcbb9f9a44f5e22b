"""Which rank's state others take over when groups are opened, and which ranks go on with their own."""

from __future__ import annotations

from typing import Any

import pytest

from bagua import FaultTolerance
from bagua.algorithms import LostStep
from bagua.engine.recovery.leading import align, who_leads
from bagua.engine.recovery.manager import RecoveryManager
from tests.engine.scripted_seat import ScriptedSeat


def rank(
    count: int,
    rule: LostStep,
    newcomer: bool = False,
    step: int | None = None,
    ending: bool = False,
    replicated: bool = True,
) -> dict[str, Any]:
    step = count if step is None else step
    told = {"round": count, "step": step, "newcomer": newcomer, "lost_step": rule.value, "ending": ending}
    return {**told, "replicated": replicated}


def test_a_rank_that_lacks_a_step_takes_it_over_where_replicas_are_equal() -> None:
    skip = LostStep.SKIP
    assert who_leads([rank(7, skip), rank(8, skip), rank(8, skip)]) == (1, [0], [])
    assert who_leads([rank(8, skip), rank(7, skip, newcomer=True)]) == (0, [1], [])


def test_a_rank_that_lacks_steps_keeps_its_weights_in_gossip_and_a_newcomer_gets_some() -> None:
    keep = LostStep.KEEP
    ranks = [rank(5, keep), rank(8, keep), rank(7, keep), rank(6, keep, newcomer=True)]
    assert who_leads(ranks) == (1, [3], [0, 2])


@pytest.mark.parametrize(("rule", "without"), [(LostStep.KEEP, [1]), (LostStep.FREE, []), (LostStep.REPEAT, [])])
def test_a_rank_that_has_begun_fewer_steps_alone_goes_on_at_the_place_of_the_others(
    rule: LostStep, without: list[int]
) -> None:
    """Rank 1 has made step 7 without its exchange, which counted for the others; they have made step 8 alone, too."""
    ranks = [rank(8, rule, step=9), rank(8, rule, step=8)]
    assert who_leads(ranks) == (0, [], without)


@pytest.mark.parametrize(("me", "skips"), [(0, 0), (1, 1), (2, 0)])
def test_it_leaves_out_the_batches_that_the_others_have_begun(me: int, skips: int) -> None:
    ranks = [rank(8, LostStep.KEEP, step=9), rank(7, LostStep.KEEP, step=8), rank(8, LostStep.KEEP, step=9)]
    for each, attempts in zip(ranks, (9, 8, 9), strict=True):
        each["attempts"] = attempts
    source, behind, without = who_leads(ranks)
    assert (source, behind, without) == (0, [], [1])
    manager = RecoveryManager(ScriptedSeat(None), FaultTolerance())
    align(manager, ranks, source, {*behind, *without}, me)
    assert manager.to_skip == skips


def test_nobody_takes_over_weights_where_no_step_waits_for_others() -> None:
    free = LostStep.FREE
    ranks = [rank(4, free, step=90), rank(4, free, step=200), rank(4, free, newcomer=True, step=70)]
    assert who_leads(ranks)[1:] == ([], [])


def test_at_the_end_of_a_warm_up_the_rank_that_is_still_in_it_takes_over() -> None:
    ranks = [rank(3, LostStep.SKIP), rank(4, LostStep.FREE, step=9)]
    assert who_leads(ranks) == (1, [0], [])


def test_of_two_ranks_at_a_step_the_one_that_has_begun_it_leads() -> None:
    repeat = LostStep.REPEAT
    assert who_leads([rank(4, repeat, step=16), rank(4, repeat, step=16, ending=True)]) == (1, [], [])
    assert who_leads([rank(4, repeat, step=17), rank(4, repeat, step=16, ending=True)]) == (0, [], [])


@pytest.mark.parametrize(("rule", "source", "behind"), [(LostStep.SKIP, 2, [0, 1]), (LostStep.KEEP, 0, [2])])
def test_only_a_newcomer_has_the_last_step_of_a_lost_rank(rule: LostStep, source: int, behind: list[int]) -> None:
    ranks = [rank(7, rule), rank(7, rule), rank(8, rule, newcomer=True)]
    assert who_leads(ranks) == (source, behind, [] if rule is LostStep.SKIP else [0, 1])
    assert ranks[source]["round"] == 8, "all count the step"


@pytest.mark.parametrize("rule", list(LostStep), ids=lambda rule: rule.name)
def test_a_job_begins_with_the_weights_of_one_rank(rule: LostStep) -> None:
    """Whatever the rule: also ranks that would keep their own weights later."""
    without = rank(0, rule, replicated=False)
    assert who_leads([dict(without), rank(0, rule), dict(without)]) == (1, [0, 2], [])
    assert who_leads([dict(without), dict(without)]) == (0, [1], [])
    assert who_leads([dict(without), rank(0, rule, step=3)]) == (1, [0], [])

"""Rows: the module as an object."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable

import torch
from torch import nn

import bagua
from bagua.engine.api import live_engines
from tests.parity.case import Case
from tests.parity.feature import NotApplicable, feature, says
from tests.parity.model import Small, equal, loss_of, train, weights

SECTION = "The module as an object"


@feature(SECTION, "`copy.deepcopy`, `pickle` and `torch.save` of the module: plain modules come out")
def copies(case: Case) -> None:
    """They hold the weights, and train alone."""
    model, optimizer = case.build()
    train(model, optimizer)
    if not case.synchronous:
        bagua.pause(model)  # nothing may move the weights while they are compared
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)):
        assert equal(weights(other), weights(model))
        loss_of(other, 0).backward()  # nobody else needs to take part
        says(ValueError, "not distributed", run=lambda other=other: bagua.stats(other))
    bagua.resume(model)
    train(model, optimizer)
    case.check_agreement(model)


@feature(SECTION, "`named_parameters`, `state_dict` and back: names and values are those of the plain module")
def state_dict(case: Case) -> None:
    """Loading copies into the weights in place, without an end to training."""
    plain = Small()
    model, optimizer = case.build()
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    saved, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    train(model, optimizer)
    bagua.pause(model)
    model.load_state_dict(saved)
    assert equal(weights(model), case.start())
    plain.load_state_dict(model.state_dict())
    assert equal(weights(plain), case.start())
    optimizer.load_state_dict(moments)
    case.distribute(model, optimizer)  # algorithms with a state of their own begin anew
    train(model, optimizer)
    case.check_same_run(model, exactly=True)


@feature(SECTION, "collected when dropped; no thread, socket or hook left behind by `detach`")
def no_leaks(case: Case) -> None:
    """As many threads and open files afterwards as before."""
    wait_for_others()
    cycles(case, 1)  # what is made once stays
    check_nothing_left(lambda: cycles(case, 4))


@feature(SECTION, "the same over 100 cycles", daily=())
def no_leaks_in_a_hundred(case: Case) -> None:
    """Slow leaks too."""
    wait_for_others()
    cycles(case, 1)
    check_nothing_left(lambda: cycles(case, 100))


def wait_for_others() -> None:
    """What the rows before this one dropped may be part of cycles, of a traceback's for one, or held by a lane."""
    deadline = time.monotonic() + 60
    gc.collect()
    while live_engines() and time.monotonic() < deadline:
        time.sleep(0.02)
        gc.collect()


def cycles(case: Case, count: int) -> None:
    """Distribute, train and detach (or just drop)."""
    for number in range(count):
        model, optimizer = case.build(lambda: nn.Linear(6, 3))
        train(model, optimizer, [0])
        if number % 2:
            bagua.detach(model)
            assert not model._forward_pre_hooks and not model._forward_hooks
            assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
        if not optimizer._optimizer_step_post_hooks:
            assert number % 2 and not optimizer._optimizer_step_pre_hooks
        ref = weakref.ref(model)
        del model, optimizer  # freed at once, without the garbage collector
        assert ref() is None, "the module is kept alive"
    assert not live_engines()


def check_nothing_left(run: Callable[[], None]) -> None:
    """As many threads and open files after `run` as before, within some seconds."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "bagua-lane":
            thread.join(60)
    before, deadline = open_things(), time.monotonic() + 60
    run()
    while any(now > then for now, then in zip(open_things(), before, strict=True)):
        assert time.monotonic() < deadline, f"{before} became {open_things()}"
        gc.collect()
        time.sleep(0.02)


def open_things() -> tuple[int, int, int]:
    """Python threads, all threads, open files."""
    return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@feature(
    SECTION,
    "the same seed and number of ranks give the same bits, run to run",
    not_applicable={"async": "the moment"},
)
def deterministic(case: Case) -> None:
    """Twice in one process, with threads and lanes; across processes, `plain` is compared by every row."""
    if not case.synchronous:
        raise NotApplicable("averages come at the moment when they are ready")
    model, optimizer = case.build(num_lanes=4)
    train(model, optimizer)
    case.check_same_run(model, exactly=True)

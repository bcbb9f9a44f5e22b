"""Work for the next groups in a thread of its own: beside training, and at the end of a script."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref

import pytest

from bagua.engine.recovery.opening import Opening
from bagua.errors import CommunicationError

BOUND_S = 60.0

# Threads that call the store all the time, as those that open groups do, when `main` returns.
SCRIPT = """
import threading
import torch.distributed as dist
from bagua.comm.store import BoundedStore
from bagua.engine.recovery.opening import Opening

def main():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    begun = threading.Barrier(5, timeout=60)

    def look(opening):
        store = BoundedStore(dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False), 60.0)
        store.check(["never"])
        begun.wait()
        while not opening.cancelled:
            store.check(["never"])

    for _ in range(4):
        Opening(look)
    begun.wait()

main()
"""


def await_done(opening: Opening[int]) -> None:
    """As the training thread, which makes steps meanwhile."""
    end = threading.Event()
    while not opening.done:
        opening.rest()
        end.wait(0.001)


def test_the_result_is_that_of_the_work() -> None:
    opening = Opening(lambda _: 3)
    await_done(opening)
    assert opening.result() == 3


def test_what_the_work_raises_is_raised_in_the_training_thread() -> None:
    def work(_: Opening[int]) -> int:
        raise KeyError("lost")

    opening = Opening(work)
    await_done(opening)
    with pytest.raises(KeyError, match="lost"):
        opening.result()


def test_no_step_is_made_while_the_work_uses_the_weights() -> None:
    resting, written = threading.Event(), []

    def work(opening: Opening[int]) -> int:
        with opening.weights_at_rest():
            resting.set()
            written.append("by the work")
        return 1

    opening = Opening(work)
    while not resting.is_set():
        opening.rest()  # returns only when the work has left the weights
    assert written == ["by the work"]
    await_done(opening)
    assert opening.result() == 1


def test_work_that_is_cancelled_gets_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagua.engine.recovery.opening._LOOK_S", 0.01)
    asked: list[str] = []

    def work(opening: Opening[int]) -> int:
        with opening.weights_at_rest():
            raise AssertionError("nobody rests")

    opening = Opening(work, lambda: asked.append("to end"))
    opening.cancel(BOUND_S)
    assert opening.done and opening.cancelled and asked == ["to end"]
    with pytest.raises(CommunicationError, match="the process ends"):
        opening.result()
    opening.rest()  # waits for nobody


def test_work_that_has_ended_is_held_by_nobody() -> None:
    gc.disable()
    try:
        opening = Opening(lambda _: 3)
        await_done(opening)
        gone = weakref.ref(opening)
        del opening
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.process
def test_a_script_that_ends_meanwhile_ends_well() -> None:
    """Before Python 3.14 a thread that returns from C++ while the interpreter ends aborts the process."""
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=2 * BOUND_S)
        assert (done.returncode, done.stderr) == (0, "")

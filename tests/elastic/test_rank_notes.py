"""What launchers write into each other's stores when a rank has ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import TCPStore

from bagua.distributed.job_store import ServedStore, connect
from bagua.distributed.rank_notes import ENDED, RankNotes, lost, trained
from bagua.membership.epoch import NO_MODEL
from tests.elastic.hosts import wait_for
from tests.ports import free_ports


@pytest.fixture
def stores() -> list[ServedStore]:
    endpoints = [("127.0.0.1", port) for port in free_ports(2)]
    return [ServedStore(endpoints) for _ in range(2)]


@pytest.fixture
def notes(stores: list[ServedStore]) -> Iterator[list[RankNotes]]:
    made = [RankNotes(each.store, f"h{at}") for at, each in enumerate(stores)]
    yield made
    for each in made:
        each.close()
    assert not [t for t in threading.enumerate() if t.name == "bagua-note"]


def test_a_rank_that_has_ended_has_no_weights_to_give(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    addresses = {f"h{at}": each.address for at, each in enumerate(stores)}
    notes[0].tell(addresses, "")
    assert notes[1].without_weights({"h0", "h1"}, 1) == set()
    notes[0].tell(addresses, ENDED)
    wait_for(lambda: set(notes[0].delivered) == {"h1"}, "note")
    assert notes[1].without_weights({"h0", "h1"}, 7) == {"h0"}
    assert notes[0].without_weights({"h0", "h1"}, 7) == set()  # its own end is known without a note


def test_a_rank_that_has_trained_to_the_end_says_after_which_step(
    stores: list[ServedStore], notes: list[RankNotes]
) -> None:
    hosts = {"h0", "h1", "h2"}
    for note in ("", ENDED, f"{ENDED} x", f"{ENDED} -1", lost(7)):
        stores[1].store.set("bagua/rank/h2", note)
        assert notes[1].trained(hosts) == NO_MODEL
    notes[0].tell({"h1": stores[1].address}, trained(4))
    wait_for(lambda: set(notes[0].delivered) == {"h1"}, "note")
    stores[1].store.set("bagua/rank/h2", trained(3))
    assert notes[1].without_weights(hosts, 7) == {"h0", "h2"}
    assert notes[1].trained(hosts) == 4 and notes[1].trained({"h2"}) == 3


def test_lost_weights_may_be_fetched_again(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    """A host that trains in a later epoch than the one in which it lost its weights has others."""
    notes[0].tell({"h1": stores[1].address}, lost(4))
    wait_for(lambda: bool(notes[1].without_weights({"h0"}, 4)), "note")
    assert notes[1].without_weights({"h0"}, 5) == set()
    notes[0].tell({"h1": stores[1].address}, lost(5))
    wait_for(lambda: bool(notes[1].without_weights({"h0"}, 5)), "later note")
    assert not notes[0].delivered  # the rank will be started again: the host has not ended


def test_hosts_that_are_gone_are_forgotten(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    """Else each host that was ever told keeps a thread, and each that ever lost a rank a key in all stores."""

    def threads() -> int:
        return sum(thread.name == "bagua-note" for thread in threading.enumerate())

    ((host, port),) = [("127.0.0.1", port) for port in free_ports(1)]
    hosts = {"h1": stores[1].address, "gone": f"{host}:{port}"}
    keys = stores[1].store.num_keys()
    notes[0].tell(hosts, lost(4))
    wait_for(lambda: bool(notes[1].without_weights({"h0"}, 4)), "note")
    notes[1].settle({"h0", "h1"}, 4)
    assert notes[1].without_weights({"h0"}, 4) == {"h0"}, "it holds in its epoch"
    notes[1].settle({"h0", "h1"}, 5)
    assert stores[1].store.num_keys() == keys
    assert threads() == 2
    notes[0].settle({"h0", "h1"}, 5)
    wait_for(lambda: threads() == 1, "end of the thread for the one that is gone")
    back = ServedStore([(host, port)])  # it was cut off only
    notes[0].tell(hosts, ENDED)
    wait_for(lambda: set(notes[0].delivered) == {"h1", "gone"}, "both notes")
    notes[1].settle({"h1"}, 6)
    assert notes[1].without_weights({"h0"}, 6) == {"h0"}, "an end is for good"
    assert RankNotes(back.store, "gone").without_weights({"h0"}, 6) == {"h0"}


def test_a_note_is_repeated_until_its_host_answers(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    ((host, port),) = [("127.0.0.1", port) for port in free_ports(1)]
    notes[0].tell({"late": f"{host}:{port}"}, ENDED)
    late = ServedStore([(host, port)])
    wait_for(lambda: "late" in notes[0].delivered, "note")
    assert RankNotes(late.store, "late").without_weights({"h0"}, 1) == {"h0"}


def test_a_host_that_has_ended_is_told_if_it_answers(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    """Its launcher may wait for this host. One whose port is closed has ended, too."""
    (gone,) = free_ports(1)
    for name in ("h1", "gone"):
        stores[0].store.set(f"bagua/rank/{name}", ENDED)
    notes[0].tell({"h1": stores[1].address, "gone": f"127.0.0.1:{gone}"}, ENDED)
    wait_for(lambda: set(notes[0].delivered) == {"h1", "gone"}, "end of both")
    assert notes[1].without_weights({"h0"}, 1) == {"h0"}


def test_a_host_that_has_ended_is_told_if_it_is_slow_to_answer(
    stores: list[ServedStore], notes: list[RankNotes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the launcher of this host ends, and that one waits for it until it takes it for lost."""
    failures = [TimeoutError("timed out"), RuntimeError("torch gave up")]

    def busy(address: str) -> TCPStore:
        if failures:
            raise failures.pop()
        return connect(address)

    monkeypatch.setattr("bagua.distributed.rank_notes.connect", busy)
    stores[0].store.set("bagua/rank/h1", ENDED)
    notes[0].tell({"h1": stores[1].address}, ENDED)
    wait_for(lambda: "h1" in notes[0].delivered, "note")
    assert not failures and notes[1].without_weights({"h0"}, 1) == {"h0"}


@pytest.mark.process
def test_a_host_that_ends_between_two_connections(notes: list[RankNotes]) -> None:
    """The fixture finds that no thread outlives `close`, however long torch tries to connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        notes[0].tell({"h1": f"127.0.0.1:{listener.getsockname()[1]}"}, ENDED)
        listener.accept()[0].close()


def test_what_is_no_note_is_ignored(stores: list[ServedStore], notes: list[RankNotes]) -> None:
    for text in ("", "lost", "lost x", "lost -1", "other 9"):
        stores[0].store.set("bagua/rank/h1", text)
        assert notes[0].without_weights({"h1"}, 0) == set()

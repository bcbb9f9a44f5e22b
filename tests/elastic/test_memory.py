"""The launcher's memory: whole commits or none, readable by other processes, gone with the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bagua.elastic.memory import VARIABLE, Memory, Slot, open_slots
from tests.lines import read_line

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture
def memory() -> Iterator[Memory]:
    held = Memory(2)
    yield held
    held.close()


def run(code: str, memory: Memory) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, VARIABLE: memory.address, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)


@pytest.mark.process
def test_a_commit_is_read_by_another_process(memory: Memory) -> None:
    ((slot, _), _) = open_slots(memory.address)
    parts = [({"item": "model", "rank": 0}, b"abc"), ({"item": "empty", "rank": 1}, b"")]
    slot.write({"number": 7}, parts)
    code = f"""
import os
from bagua.elastic.memory import open_slots
slot = open_slots(os.environ["{VARIABLE}"])[0][0]
about = slot.about()
print(about["number"], [part["item"] for part in about["parts"]], slot.part(0), slot.part(1))
"""
    assert run(code, memory).stdout.strip() == "7 ['model', 'empty'] b'abc' b''"


@pytest.mark.process
def test_a_writer_that_is_killed_leaves_no_commit(memory: Memory) -> None:
    """Killed while it writes the second part; the other slot is untouched."""
    _, (first, second) = open_slots(memory.address)
    first.write({"number": 1}, [({}, b"old")])
    second.write({"number": 0}, [({}, b"older")])
    code = f"""
import os, signal
from bagua.elastic import memory
slot = memory.open_slots(os.environ["{VARIABLE}"])[1][1]
put = slot._put
def dies(data, at):
    if bytes(data) == b"b" * 100:
        os.kill(os.getpid(), signal.SIGKILL)
    return put(data, at)
slot._put = dies
slot.write({{"number": 2}}, [({{}}, b"a" * 100), ({{}}, b"b" * 100)])
"""
    assert run(code, memory).returncode == -signal.SIGKILL
    assert second.about() is None
    assert first.about() is not None and first.part(0) == b"old"


def test_a_shorter_commit_replaces_a_longer_one(memory: Memory) -> None:
    ((slot, _), _) = open_slots(memory.address)
    slot.write({"number": 1}, [({}, os.urandom(100_000))])
    slot.write({"number": 2}, [({}, b"short")])
    about = slot.about()
    assert about is not None and about["number"] == 2 and slot.part(0) == b"short"
    with pytest.raises(ValueError, match="no part 1"):
        slot.part(1)


def test_damage_is_noticed(memory: Memory) -> None:
    ((slot, _), _) = open_slots(memory.address)
    slot.write({"number": 1}, [({}, b"x" * 50)])
    file = slot._file
    end = os.fstat(file).st_size
    os.pwrite(file, b"y", end - 1)
    with pytest.raises(ValueError, match="damaged"):
        slot.part(0)
    os.ftruncate(file, end - 1)
    assert slot.about() is None


def test_other_files_are_refused(memory: Memory, tmp_path: Path) -> None:
    with open(tmp_path / "file", "w+") as file:
        address = f"{os.getpid()}:{'00' * 16}:{file.fileno()},{file.fileno()}"
        with pytest.raises(ValueError, match="cannot be opened"):
            open_slots(address)
    pid, _, files = memory.address.split(":")
    with pytest.raises(ValueError, match="not memory of this job"):
        open_slots(f"{pid}:{'00' * 16}:{files}")
    for wrong in ("", "1:2", "a:b:c", f"{pid}:zz:1"):
        with pytest.raises(ValueError, match=VARIABLE):
            open_slots(wrong)


@pytest.mark.process
def test_the_memory_is_gone_with_the_launcher() -> None:
    code = "from bagua.elastic.memory import Memory\nm = Memory(1)\nprint(m.address, flush=True)\ninput()"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen([sys.executable, "-c", code], env=env, stdin=-1, stdout=-1, text=True)
    address = read_line(launcher.stdout, "address").strip()
    ((slot, _),) = open_slots(address)
    assert isinstance(slot, Slot)
    launcher.kill()
    launcher.wait(60)
    launcher.communicate(timeout=60)
    with pytest.raises(ValueError, match="cannot be opened"):
        open_slots(address)


@pytest.mark.parametrize("number", [0, -1, 100_000])
def test_a_wrong_number_of_ranks(number: int) -> None:
    with pytest.raises(ValueError, match="num_ranks"):
        Memory(number)

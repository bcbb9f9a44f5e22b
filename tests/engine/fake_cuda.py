"""Streams and events that only keep account of what happens before what, in place of CUDA's.

`known` of a stream is what has been enqueued on it, or had to be over before what comes next on it may begin.
"""

from __future__ import annotations

import itertools
from threading import local
from typing import Any

import pytest
import torch

_numbers = itertools.count(1)


class FakeStream:
    def __init__(self, device: Any = None) -> None:
        self.device, self.known, self.synchronized = device, set(), 0
        self.raw = next(_numbers)

    def do(self, what: str) -> None:
        """Enqueue something."""
        self.known.add(what)

    def wait_event(self, event: FakeEvent) -> None:
        self.known |= event.known

    def wait_stream(self, other: FakeStream) -> None:
        self.known |= other.known

    def synchronize(self) -> None:
        self.synchronized += 1

    def query(self) -> bool:
        return True


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        self.known: frozenset[str] | None = None

    def record(self, stream: FakeStream) -> None:
        self.known = frozenset(stream.known)

    def query(self) -> bool:
        return self.known is not None

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.known is not None and other.known is not None
        return 1500.0


class FakeCuda:
    """What `install` returns: `stream()` is the current one of this thread."""

    def __init__(self) -> None:
        self.default, self._current = FakeStream(), local()

    def current(self, _device: Any = None) -> FakeStream:
        return getattr(self._current, "stream", self.default)

    def raw(self, _index: int) -> int:
        return self.current().raw

    def on(self, stream: FakeStream) -> FakeContext:
        return FakeContext(self, stream)

    def set(self, stream: FakeStream) -> None:
        self._current.stream = stream


class FakeContext:
    """Can be entered again and again, as torch's."""

    def __init__(self, cuda: FakeCuda, stream: FakeStream) -> None:
        self._cuda, self._stream = cuda, stream

    def __enter__(self) -> None:
        self._before = self._cuda.current()
        self._cuda.set(self._stream)

    def __exit__(self, *_: object) -> None:
        self._cuda.set(self._before)


def install(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Put the fakes in the place of torch's."""
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    monkeypatch.setattr(torch.cuda, "stream", fake.on)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", fake.raw, raising=False)
    return fake

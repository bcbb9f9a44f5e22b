"""Commits on the disk, written in the background as checkpoints of `bagua.checkpoint`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from bagua.checkpoint.archive import save_packed
from bagua.comm.store_team import Counters
from bagua.comm.team import Team
from bagua.elastic.commit import Commit

__all__ = ["Disk"]

_log = logging.getLogger("bagua")


class Disk:
    """Writes every n-th commit. Read them with `bagua.checkpoint.load`.

    Args:
        team: all ranks.
        directory: of this training alone, seen by all ranks.
        every: number of commits between two writes.
        keep: number of checkpoints kept.
    """

    def __init__(self, team: Team, directory: Path, every: int, keep: int) -> None:
        # A team of its own: the training's collectives run meanwhile.
        store = None if team.store is None else team.store.under(f"elastic/{team.next_lane()}")
        self._team = replace(team, store=store, counters=Counters())
        self.directory, self._every, self._keep = directory, every, keep
        self._thread: threading.Thread | None = None

    def due(self, number: int) -> bool:
        """Whether commit `number` goes to the disk."""
        return number % self._every == 0

    def write(self, commit: Commit, data: Mapping[str, bytes]) -> None:
        """Queue a write. All ranks must call it, for the same commit.

        Args:
            commit: what it is.
            data: all parts of this rank; those that it owns are written.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(commit, data), name="bagua-elastic-disk", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until nothing is being written; the team's timeout bounds each collective of the writers."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, commit: Commit, data: Mapping[str, bytes]) -> None:
        try:
            save_packed(
                self.directory,
                data,
                commit.kinds,
                commit.owners,
                step=commit.number,
                keep=self._keep,
                process_group=self._team,
            )
        except Exception:  # the commit is in memory, and the next one is tried again
            _log.exception("elastic: commit %d could not be written to disk", commit.number)

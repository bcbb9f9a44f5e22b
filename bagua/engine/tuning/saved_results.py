"""Autotuning results in a file: keyed by model and job, read by rank 0 and broadcast."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import nn

from bagua.algorithms.base import Algorithm
from bagua.autotune import Autotune, Settings
from bagua.autotune.log import open_log
from bagua.autotune.saved import load
from bagua.comm.store_team import decode, encode
from bagua.comm.team import Team
from bagua.engine.tuning.session import TuningSession
from bagua.errors import RankMismatchError

__all__ = ["check_files", "session_of"]


def check_files(options: Autotune | None, rank: int) -> ValueError | None:
    """What is wrong with the files that `options` name, on rank 0, which reads and writes them."""
    if options is None or rank:
        return None
    try:
        if options.file is not None:
            load(options.file, "")
        if isinstance(options.log, str):
            open_log(options.log)
    except ValueError as error:
        return error
    return None


def session_of(
    options: Autotune | None,
    team: Team,
    module: nn.Module,
    algorithm: Algorithm,
    signature: list[list[str]],
    nodes: Sequence[Sequence[int]],
) -> TuningSession | None:
    """Make what `options` ask for. Collective if they name a file of results.

    Raises:
        ValueError: rank 0 has found something else in the file. On the other ranks it is a `RankMismatchError`.
    """
    if options is None:
        return None
    if options.file is None:
        return TuningSession(options)
    facts = [signature, repr(algorithm), [list(node) for node in nodes], team.backend]
    digest = hashlib.sha256(encode(facts)).hexdigest()[:16]
    ranks = f"{team.size} ranks on {len(nodes)} nodes"
    key = f"{type(module).__name__}, {algorithm.name}, {ranks}, {team.backend}, {digest}"
    payload, problem = None, None
    if team.rank == 0:
        content = None
        try:
            found = load(options.file, key)
            content = None if found is None else found.as_json()
        except ValueError as error:  # the other ranks must hear of it
            problem = error
        payload = encode([content, None if problem is None else f"{type(problem).__name__}: {problem}"])
    content, said = decode(team.broadcast_bytes("saved results of tuning", payload))
    if problem is not None:
        raise problem
    if said is not None:
        raise RankMismatchError(f"rank 0 cannot distribute its module: {said}")
    return TuningSession(options, key, None if content is None else Settings.from_json(content))

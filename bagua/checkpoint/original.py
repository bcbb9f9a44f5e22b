"""Checkpoints in the layout of Bagua 0.9.

    path/
      latest_checkpointed_iteration.txt                  the iteration, or "release"
      iter_0000120/mp_rank_00_model_states.pt            iteration, model, optimizer, lr_scheduler; rank 0's
      iter_0000120/expert_<id>_mp_rank_00_model_states.pt              each expert of a mixture of experts
      iter_0000120/expert_parallel_rank_<rank>_mp_rank_00_optim_states.pt   with experts: the optimizer, by rank
      iter_0000120/bagua/...                             not Bagua 0.9's: the state that resuming needs, by rank

Source: bagua/torch_api/checkpoint/checkpointing.py of Bagua 0.9, by its behaviour.
"""

from __future__ import annotations

import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagua.checkpoint.agree import agree, team_of
from bagua.checkpoint.archive import load, save
from bagua.checkpoint.directory import check_not_removed, find, remove_leftovers, sync_directory, write_file
from bagua.checkpoint.errors import CheckpointError
from bagua.checkpoint.experts import split_experts, to_local, with_number
from bagua.checkpoint.tolerant import LOAD_BEFORE, SAVE_TOGETHER, refuse_fault_tolerant

__all__ = ["load_checkpoint", "save_checkpoint"]

_TRACKER = "latest_checkpointed_iteration.txt"
_OURS = "bagua"
_STATES = "mp_rank_00_model_states.pt"
_ITERATION = re.compile(r"iter_([0-9]{7,18})")
_LEFTOVER = re.compile(r"\.(.*_states\.pt|latest_checkpointed_iteration\.txt)\.[0-9a-f]{8}")


def save_checkpoint(
    iteration: int, checkpoints_path: str, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None
) -> None:
    """Save in the layout of Bagua 0.9, plus the state needed to resume with the same bits. Collective.

    Args:
        iteration: training iteration.
        checkpoints_path: directory of all checkpoints.
        model: distributed or not.
        optimizer: one optimizer, or None.
        lr_scheduler: its scheduler, or None.

    Raises:
        ValueError: `iteration` is none; or layers of `model` hold different numbers of experts.
        CheckpointError: a rank could not write; the tracker still points to the checkpoint before.

    Differs: written atomically; what a killed process left is removed; the algorithm's state is saved, and every
        rank's own weights where ranks differ.

    Examples:
        >>> bagua.checkpoint.save_checkpoint(100, path, model, optimizer)
    """
    if isinstance(iteration, bool) or not isinstance(iteration, int) or iteration < 0:
        raise ValueError(f"iteration: expected an integer >= 0, got {iteration!r}")
    objects = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    what = f"saving iteration {iteration} to {checkpoints_path}"
    refuse_fault_tolerant(objects, what, SAVE_TOGETHER)
    team, root = team_of(None), Path(checkpoints_path)
    folder = root / f"iter_{iteration:07d}"
    given = {name: value for name, value in objects.items() if value is not None}
    if team.rank == 0:  # before the others begin to write: they wait in `save`
        _remove_leftovers(root, folder)
    save(folder / _OURS, given, step=iteration, keep=1)
    problem: BaseException | None = None
    try:
        states = {name: value.state_dict() for name, value in given.items()}
        states["model"], experts = split_experts(states["model"], team.rank)
        if experts:
            mine = {f"expert_{number}_{_STATES}": expert for number, expert in experts.items()}
            mine[_optimizer_file(team.rank)] = {"optimizer": states.pop("optimizer", None)}
            for name, value in mine.items():
                _write(folder / name, value)
        if team.rank == 0:
            _write(folder / _STATES, {"iteration": iteration, **states})
    except Exception as error:  # the other ranks must hear of it
        problem = error
    agree(team, what, None, problem)
    if team.rank == 0:
        try:
            _replace(root / _TRACKER, lambda path: _write_text(path, str(iteration)))
        except Exception as error:
            problem = error
    agree(team, what, None, problem)


def load_checkpoint(
    checkpoints_path: str, model: nn.Module, optimizer: Any = None, lr_scheduler: Any = None, strict: bool = True
) -> int:
    """Load the last checkpoint that `save_checkpoint` wrote, here or in Bagua 0.9. Collective.

    Args:
        checkpoints_path: as in `save_checkpoint`.
        model, optimizer, lr_scheduler: where to; None leaves that part out.
        strict: as in `nn.Module.load_state_dict`; False takes the layout of Bagua 0.9, without the state of the
            algorithm.

    Returns:
        The iteration; 0 if there is no checkpoint.

    Raises:
        CheckpointError: the tracker or a file is damaged, or a part is missing; names it.

    Differs: files are read without unpickling arbitrary classes; `strict` acts; a damaged tracker is an error and
        does not end the process; "release" is read from its own directory.

    Examples:
        >>> bagua.checkpoint.save_checkpoint(100, path, model, optimizer)
        >>> bagua.checkpoint.load_checkpoint(path, model, optimizer)
        100
    """
    what = f"loading from {checkpoints_path}"
    refuse_fault_tolerant({"model": model}, what, LOAD_BEFORE)
    team, root = team_of(None), Path(checkpoints_path)
    latest: tuple[int, str, bool] | None = None
    problem: BaseException | None = None
    try:
        if team.rank == 0:
            latest = _latest(root)
    except Exception as error:  # the other ranks must hear of it
        problem = error
    (chosen, *_) = agree(team, what, latest, problem)
    if chosen is None:
        return 0
    iteration, folder, ours = chosen[0], root / chosen[1], chosen[2]
    given = {"model": model, "optimizer": optimizer, "lr_scheduler": lr_scheduler}
    given = {name: value for name, value in given.items() if value is not None}
    if ours and strict:
        loaded = load(folder / _OURS, given)
        assert loaded is not None
        return iteration
    parts: dict[str, Any] = {}
    try:
        parts = _read(folder, model, team.rank)
        lacking = [name for name in given if name not in parts]
        if lacking:
            raise CheckpointError(f"{folder / _STATES} holds no {', '.join(lacking)}")
    except Exception as error:  # the other ranks must hear of it
        problem = error
    agree(team, what, None, problem)
    model.load_state_dict(parts["model"], strict=strict)
    for name, value in given.items():
        if name != "model":
            value.load_state_dict(parts[name])
    return iteration


def _latest(root: Path) -> tuple[int, str, bool] | None:
    """Iteration and directory that the tracker names, and whether our state is there too; None without a tracker."""
    try:
        content = (root / _TRACKER).read_bytes()
    except FileNotFoundError:
        return None
    text = content[:100].decode(errors="backslashreplace").strip()
    if text != "release" and not re.fullmatch(r"[0-9]{1,18}", text):
        raise CheckpointError(f"{root / _TRACKER}: expected an iteration or 'release', got {text!r}")
    iteration, name = (0, text) if text == "release" else (int(text), f"iter_{int(text):07d}")
    return iteration, name, bool(find(root / name / _OURS))


def _remove_leftovers(root: Path, folder: Path) -> None:
    """Remove what killed saves have left.

    A tracker is written last, so they were at the iteration that it names or later, or at that of `folder`, which is
    to be written now.
    """
    try:
        latest = _latest(root)
    except (OSError, ValueError, CheckpointError):  # damaged
        latest = None
    since = 0 if latest is None else latest[0]
    with suppress(OSError, ValueError):  # what cannot be listed cannot be written to, which `save` reports
        matches = [match for name in os.listdir(root) if (match := _ITERATION.fullmatch(name))]
        later = [root / match[0] for match in matches if int(match[1]) >= since and match[0] != folder.name]
        for place in (root, folder, *later):
            for name in os.listdir(place) if place.is_dir() else ():
                if _LEFTOVER.fullmatch(name):
                    (place / name).unlink(missing_ok=True)
        for place in later:  # `save` does it in `folder`
            if (place / _OURS).is_dir():
                remove_leftovers(place / _OURS)


def _read(folder: Path, model: nn.Module, rank: int) -> dict[str, Any]:
    """What Bagua 0.9 wrote, for this rank. Experts of rank r with n each are those from r n on."""
    parts = _load(folder / _STATES)
    if not isinstance(parts, dict) or not isinstance(parts.get("model"), dict):
        raise CheckpointError(f"{folder / _STATES}: holds no model")
    numbers = with_number(model.state_dict(), rank)
    if not numbers:
        return parts
    for number, local in numbers:
        for name, tensor in _load(folder / f"expert_{number}_{_STATES}").items():
            mine = to_local(name, number, local)
            if mine is None:
                raise CheckpointError(f"{folder}: the file of expert {number} holds {name!r}")
            parts["model"][mine] = tensor
    optimizer = folder / _optimizer_file(rank)
    if optimizer.exists() and (state := _load(optimizer)["optimizer"]) is not None:
        parts["optimizer"] = state
    return parts


def _optimizer_file(rank: int) -> str:
    return f"expert_parallel_rank_{rank}_mp_rank_00_optim_states.pt"


def _write(path: Path, value: Any) -> None:
    _replace(path, lambda beside: write_file(beside, value))


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path}: cannot be read ({reason})") from error


def _replace(path: Path, write: Any) -> None:
    """Have `write` make a file beside `path`, and put it in its place when it is on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        write(beside)
        os.replace(beside, path)
    except FileNotFoundError:
        check_not_removed(beside)
        raise
    finally:
        beside.unlink(missing_ok=True)
    sync_directory(path.parent)


def _write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())

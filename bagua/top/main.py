"""`bagua top`: show a running job.

bagua top                    the job of this user on this machine
bagua top node1:29400        a fault-tolerant job, by one of its --rdzv-endpoint
bagua top --once --json      one look, for programs
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Sequence

from bagua.top.looking import Observer, TopError
from bagua.top.picture import Picture
from bagua.top.text import lines_of

__all__ = ["main"]

_HOME, _CLEAR_LINE, _CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"
_SHORT_S = 1.0  # between the two looks of --once, from which rates are computed
_PATIENCE = 3  # looks in a row without an answer, until a job counts as ended


def main(argv: Sequence[str] | None = None) -> int:
    """Show it.

    Returns:
        0; 1 if there is no such job, or it does not answer; 2 for wrong arguments.
    """
    args = _parser().parse_args(argv)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch says in many lines what is said here in one
    token = os.environ.get("BAGUA_JOB_TOKEN", "").encode() or None
    observer = Observer(args.address, args.job, token)
    try:
        picture = observer.look()
    except TopError as error:
        print(f"bagua top: {error}", file=sys.stderr)
        return 1
    if args.once or args.json or not sys.stdout.isatty():
        time.sleep(args.every or _SHORT_S)
        picture = _again(observer) or picture
        if args.json:
            print(json.dumps(picture.to_dict()))
        else:
            print("\n".join(lines_of(picture)))
        return 0
    return _follow(observer, picture, args.every or 2 * _SHORT_S)


def _follow(observer: Observer, picture: Picture, every_s: float) -> int:
    missed = 0
    sys.stdout.write(_HOME + _CLEAR_BELOW)
    while missed < _PATIENCE:
        _draw(picture)
        time.sleep(every_s)
        now = _again(observer)
        missed = missed + 1 if now is None else 0
        picture = now or picture
    print(f"bagua top: job {picture.job} has ended, or does not answer any more")
    return 0


def _draw(picture: Picture) -> None:
    """Over the last one, so that nothing flickers."""
    size = shutil.get_terminal_size()
    shown = [line[: size.columns] for line in [*lines_of(picture), "", "Ctrl-C ends this view"][: size.lines - 1]]
    sys.stdout.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\n" for line in shown) + _CLEAR_BELOW)
    sys.stdout.flush()


def _again(observer: Observer) -> Picture | None:
    try:
        return observer.look()
    except TopError:
        return None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bagua top",
        description="Show a running job: ranks, steps, communication, changes of the members.",
    )
    parser.add_argument(
        "address",
        nargs="?",
        metavar="HOST:PORT",
        help="of a fault-tolerant job: one of its --rdzv-endpoint. Default: this user's job on this machine",
    )
    parser.add_argument("--job", metavar="NAME", help="which one, if several run here; the beginning is enough")
    parser.add_argument("--once", action="store_true", help="two looks --every seconds apart, printed once")
    parser.add_argument("--json", action="store_true", help="for programs; implies --once")
    parser.add_argument("--every", type=_seconds, metavar="S", help="seconds between two looks (2; with --once 1)")
    return parser


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, not {text!r}")
    return value

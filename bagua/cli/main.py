"""`bagua COMMAND ...`: dispatches to the commands."""

from __future__ import annotations

import gc
import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType

from bagua.signals import end_by_exception

__all__ = ["main"]

# name -> (what it does, the module whose `main(argv) -> int` does it)
_COMMANDS = {
    "bench": (
        "measure training steps on emulated networks, beside DDP, other libraries and the physical bound",
        "bagua.bench.main",
    ),
    "doctor": ("check what works on this machine; with --cluster, all hosts of a job", "bagua.cli.doctor"),
    "lab": ("an emulated cluster on this machine: bagua lab run --hosts 4 ... -- bagua run ...", "bagua.lab.main"),
    "plan": ("predict the step time of each algorithm on a cluster that is not yet bought", "bagua.plan.main"),
    "run": ("start a script on every rank: torchrun with Bagua's flags", "bagua.distributed.run"),
    "top": ("show a running job: ranks, steps, communication, changes of the members", "bagua.top.main"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        the command's exit code; 2 for a command that does not exist; 130 after Ctrl-C.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words:
        print(_usage(), file=sys.stderr)
        return 2
    name, rest = words[0], words[1:]
    if name in ("-h", "--help"):
        print(_usage())
        return 0
    if name in ("-V", "--version"):
        print(f"bagua {_version()}")
        return 0
    if name not in _COMMANDS:
        print(f"bagua: unknown command {name!r}\n\n{_usage()}", file=sys.stderr)
        return 2
    # Commands do not use NumPy; without it torch warns in every process that imports it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    try:
        with end_by_exception():
            load = _load if argv is None else importlib.import_module
            return load(_COMMANDS[name][1]).main(rest)
    except KeyboardInterrupt:
        print(f"bagua {name}: interrupted", file=sys.stderr)
        return 130


def _load(module: str) -> ModuleType:
    """Import a command's module in a process of its own.

    What is imported lives until the end, so no collection of garbage needs to look at it: with torch that takes part of
    the time of the import, and most of that at the end of the process.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.freeze()
        gc.enable()


def _usage() -> str:
    commands = "\n".join(f"  {name:<8}{what}" for name, (what, _) in _COMMANDS.items())
    return (
        "usage: bagua COMMAND ...\n       bagua --version\n\n"
        f"commands:\n{commands}\n\n`bagua COMMAND --help` shows its options."
    )


def _version() -> str:
    try:
        return version("bagua")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())

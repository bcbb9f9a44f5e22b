"""`python -m benchmarks.original --checkout PATH [--only TEXT] [--json FILE]`: the original's examples, here.

PATH is a checkout of github.com/BaguaSys/bagua; nothing of it is copied. Each of its examples runs with each algorithm
that it offers, started by this package's launchers, on CPU ranks over gloo. Changed is the device, in memory, by the
list of `benchmarks.original.device`; data sets and the BERT are synthetic and small. Wants torchvision, and for squad
transformers 4.40 with NumPy 2.0 and tensorboardX. A run is passed when all ranks exit with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.bench import progress, results_file
from bagua.bench.machine import describe_machine, now
from benchmarks.original.device import CHANGES, to_cpu
from benchmarks.original.runs import Run, all_runs

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600  # seconds for a run
_LOSS = re.compile(r"(?:loss\w*[:=]?|Loss) *(?:= *)?([0-9.]+(?:e[-+]?\d+)?|nan)", re.IGNORECASE)
_ERROR = re.compile(r"^(?:\[rank\d+\]: *)?((?:[\w.]+\.)?\w*(?:Error|Exception|Warning|Exit)\b.*)$")
# squad pickles its features, which torch.load refuses since 2.6 unless told; nothing is downloaded.
_ENVIRONMENT: dict[str, str] = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the examples and print, or write, what came of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.original", description="The original's examples, here.")
    parser.add_argument("--checkout", type=Path, required=True, help="of github.com/BaguaSys/bagua")
    parser.add_argument("--only", default="", help="runs whose example and flags contain this text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep the output of each run")
    args = parser.parse_args(argv)
    if not (args.checkout / "examples").is_dir():
        parser.error(f"--checkout {args.checkout}: there is no folder 'examples' in it")
    runs = [run for run in all_runs() if args.only in f"{run.example} {run.flags}"]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        _python("-m", "benchmarks.original.data", str(base / "data"))
        for number, run in enumerate(runs):
            progress.show(f"{number + 1} of {len(runs)}: {run.example} {run.flags}")
            here = base / (f"run{number - 1}" if run.again else f"run{number}")
            here.mkdir(exist_ok=True)
            row, output = make(run, args.checkout.resolve(), base / "data", here)
            progress.clear()
            print(f"{row['result']:7} {row['seconds']:4.0f} s  {run.example} {run.flags}  {row['error']}", flush=True)
            rows.append(row)
            if args.logs is not None:
                args.logs.mkdir(parents=True, exist_ok=True)
                (args.logs / f"{number:02}-{run.example}.log").write_text(output)
    passed = sum(row["result"] == "ran" for row in rows)
    print(f"{passed} of {len(rows)} ran")
    if args.json is not None:
        results_file.write(args.json, {**facts(args.checkout), "rows": rows})
    return 0 if passed == len(rows) else 1


def make(run: Run, checkout: Path, data: Path, here: Path) -> tuple[dict[str, Any], str]:
    """Make one run.

    Returns:
        The row of the table, and all output.
    """
    script = checkout / "examples" / run.example / run.script
    _, lines = to_cpu(script.read_text())
    flags = run.flags.removeprefix("(resumed)").split()
    size = shlex.split(run.size.format(data=data, here=here))
    if run.elastic:
        size += ["--data_dir", str(data)]
    launcher = ["bagua.distributed.launch", "--nproc_per_node", str(run.ranks)]
    if run.elastic:
        launcher = ["bagua.distributed.run", "--nnodes=1:4", f"--nproc_per_node={run.ranks}", "--rdzv_id=original"]
        launcher += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "--max_restarts=0"]
    command = ["-m", *launcher, "-m", "benchmarks.original.rank", str(script), *size, *flags]
    start = time.monotonic()
    with (here / "output").open("w+") as output:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", *command],
            cwd=here,  # beside `data`: the examples look for MNIST in `../data`
            env=_environment(),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        text = output.read()
    losses = _LOSS.findall(text)
    row = {
        "example": run.example,
        "flags": run.flags,
        "ranks": run.ranks,
        "result": "ran" if code == 0 else "failed",
        "error": "" if code == 0 else f"over {LIMIT} s" if code is None else _error(text),
        "last_loss": losses[-1] if losses else "",
        "lines_changed": lines,
        "seconds": round(time.monotonic() - start, 1),
    }
    return row, text


def facts(checkout: Path) -> dict[str, Any]:
    """What the results depend on: when, where, which versions, which changes."""
    commit = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True).stdout
    packages = {}
    for name in ("numpy", "torchvision", "transformers", "tensorboardX"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "when": now(),
        "machine": describe_machine(),
        "original": commit.strip() or "not a git checkout",
        "packages": packages,
        "changes": [list(change) for change in CHANGES],
        "environment": _ENVIRONMENT,
    }


def _python(*words: str) -> None:
    subprocess.run([sys.executable, "-W", "ignore", *words], check=True, env=_environment())


def _environment() -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | _ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)}


def _error(text: str) -> str:
    """Return the last line that looks like an exception of a rank."""
    lines = [found[1] for line in text.splitlines() if (found := _ERROR.match(line.strip()))]
    own = [line for line in lines if "ChildFailedError" not in line and "FutureWarning" not in line]
    return own[-1] if own else "no exception was printed"


if __name__ == "__main__":
    sys.exit(main())

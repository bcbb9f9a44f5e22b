"""Everything that a machine with one GPU can show, in parts; each in a process of its own, with a time limit.

A part that fails or takes too long does not stop the others. Results: a JSON file for each part and a page, in
`--out`. Exit status 1 if a part failed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import page, summary
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.record import Record

__all__ = ["main"]

_ROOT = Path(__file__).resolve().parents[2]
_BUILD_S = 300


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--part", action="append", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--dry", action="store_true", help="on the CPU, tiny: shows that the parts run")
    parser.add_argument(
        "--out", type=Path, help=f"folder of the results (benchmarks/results/{today}-gpu; dry: out/gpu)"
    )
    parser.add_argument("--no-build", action="store_true", help="do not build CPU kernels and Bagua-Net if missing")
    parser.add_argument("--alone", type=Path, help=argparse.SUPPRESS)  # make one part here, results to this file
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = _ROOT / ("out/gpu" if args.dry else f"benchmarks/results/{today}-gpu")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts; returns the exit status."""
    args = arguments(argv)
    chosen = [PARTS[name] for name in args.part or PARTS]
    if args.alone is not None:
        (part,) = chosen
        return _alone(part, args.dry, args.alone)
    if not args.no_build:
        _build()
    limit = sum(part.limit_s for part in chosen)
    print(f"{len(chosen)} parts, at most {limit / 60:.0f} minutes; results in {args.out}", flush=True)
    results = []
    for part in chosen:
        print(f"\n{part.name}: {part.about} (at most {part.limit_s} s)", flush=True)
        results.append(_run(part, args.dry, args.out / f"{part.name}.json"))
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    words = " ".join(["python -m benchmarks.gpu", *(argv if argv is not None else sys.argv[1:])])
    (args.out / "README.md").write_text(page(results, date, words))
    print(f"\n{summary(results)}\n{args.out / 'README.md'}", flush=True)
    return int(any(each["status"] == "failed" for each in results))


def _alone(part: Part, dry: bool, path: Path) -> int:
    record = Record(part.name, dry, path)
    try:
        part.run(record)
    except Exception as error:
        with record.check(f"the part itself ran to its end ({type(error).__name__})"):
            raise
    record.save()
    sys.stdout.flush()
    return int(record.status == "failed")


def _run(part: Part, dry: bool, path: Path) -> dict[str, Any]:
    """Make a part in a process of its own, and read what it has left."""
    path.unlink(missing_ok=True)
    words = [sys.executable, "-m", "benchmarks.gpu", "--part", part.name, "--alone", str(path.resolve())]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(_ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(":")}
    if dry:
        words.append("--dry")
        env["CUDA_VISIBLE_DEVICES"] = ""
        if importlib.util.find_spec("triton") is not None and part.name == "kernels":
            env["TRITON_INTERPRET"] = "1"
    begun = time.monotonic()
    # A session of its own, so that at the limit its children end with it.
    process = subprocess.Popen(words, cwd=_ROOT, env=env, start_new_session=True)
    late = ""
    try:
        process.wait(part.limit_s)
    except subprocess.TimeoutExpired:
        late = f"ended at its limit of {part.limit_s} s"
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    empty = Record(part.name, dry).data()
    result = json.loads(path.read_text()) if path.exists() else empty
    result["seconds"] = round(time.monotonic() - begun, 1)
    lost = "" if path.exists() else "left no result"
    died = f"exit status {process.returncode}" if process.returncode not in (0, 1) else ""
    if late or died or lost:
        result["status"] = "failed"
        result["reason"] = "; ".join(filter(None, [late, "" if late else died, lost, result["reason"]]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _build() -> None:
    """Build what is missing of the compiled parts, if there is a compiler; it needs no network."""
    from bagua.codecs import available_backends
    from bagua.net.plugin import plugin_path

    with contextlib.suppress(RuntimeError):
        plugin_path()
        if len(available_backends()) > 1:
            return
    if shutil.which(os.environ.get("CXX", "g++")) is None or importlib.util.find_spec("setuptools") is None:
        print("no C++ compiler or no setuptools: CPU kernels and Bagua-Net are not built", flush=True)
        return
    print("building the CPU kernels and Bagua-Net", flush=True)
    try:
        words = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        subprocess.run(words, cwd=_ROOT, timeout=_BUILD_S, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"not built: {error}", flush=True)


if __name__ == "__main__":
    sys.exit(main())

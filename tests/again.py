"""Run the tests that have just failed once more, one after the other: `python -m tests.again`, after `make test`.

Tests of real processes depend on timing, and a failure in one of thousands of runs would hold back a change that has
nothing to do with it. Each test that passes now is named as flaky: a defect to be found, of the test or the library.

As a plugin of pytest it notes how a run has ended: of one that was broken off nobody knows what else would have failed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

__all__ = ["MOST", "main", "pytest_sessionfinish"]

MOST = 2  # more failures are no chance
CACHE = Path(".pytest_cache/v")
_STATUS = "bagua/exitstatus"


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Write down how this run has ended, once for all workers."""
    if hasattr(session.config, "cache") and not hasattr(session.config, "workerinput"):
        session.config.cache.set(_STATUS, int(exitstatus))


def main(cache: Path = CACHE) -> int:
    """Returns 0 if the run came to its end, at most `MOST` of its tests had failed, and all of these pass now.

    Args:
        cache: where pytest has written how the run ended, and the names of the tests that failed.
    """
    ended, failed = cache / _STATUS, cache / "cache" / "lastfailed"
    if not ended.exists() or int(ended.read_text()) != pytest.ExitCode.TESTS_FAILED:
        print("again: the run was broken off, or something else than a test failed")
        return 1
    names = list(json.loads(failed.read_text())) if failed.exists() else []
    if not 0 < len(names) <= MOST or any("::" not in name for name in names):
        told = ", ".join(names)
        print(f"again: not run again: {len(names)} tests or whole files failed, {MOST} tests at most: {told}")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", *names], check=False).returncode
    if code == 0:
        print("\n".join(f"FLAKY: {name} failed once and passed the second time" for name in names))
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

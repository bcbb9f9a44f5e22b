"""Run the tests that have just failed once more, one after the other: `python -m tests.again`, after `make test`.

Tests of real processes depend on timing, and a failure in one of thousands of runs would hold back a change that has
nothing to do with it. Each test that passes now is named as flaky: a defect to be found, of the test or the library.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

__all__ = ["MOST", "main"]

MOST = 2  # more failures are no chance
LAST = Path(".pytest_cache/v/cache/lastfailed")


def main(last: Path = LAST) -> int:
    """Returns 0 if at most `MOST` tests had failed and all pass now.

    Args:
        last: what pytest writes of the tests that failed, a JSON object with their names as keys.
    """
    names = list(json.loads(last.read_text())) if last.exists() else []
    if not names:
        print("again: no test is known to have failed, so something else did")
        return 1
    if len(names) > MOST or any("::" not in name for name in names):
        print(f"again: not run again, as more than {MOST} tests or whole files failed: {', '.join(names)}")
        return 1
    code = subprocess.run([sys.executable, "-m", "pytest", "-q", *names], check=False).returncode
    if code == 0:
        print("\n".join(f"FLAKY: {name} failed once and passed the second time" for name in names))
    return int(code != 0)


if __name__ == "__main__":
    sys.exit(main())

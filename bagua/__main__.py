"""`python -m bagua` is the `bagua` command, also from a checkout that is not installed."""

from __future__ import annotations

import sys

from bagua.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

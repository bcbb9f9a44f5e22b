"""`bagua run ... -m bagua.doctor`."""

from __future__ import annotations

import sys

from bagua.doctor.main import main

sys.exit(main())

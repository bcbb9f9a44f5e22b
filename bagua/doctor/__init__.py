"""`bagua doctor --cluster`: check the hosts of a job and the links between them, before the job."""

from __future__ import annotations

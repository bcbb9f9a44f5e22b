"""`bagua top`: a running job as its launchers and ranks describe it."""

from __future__ import annotations

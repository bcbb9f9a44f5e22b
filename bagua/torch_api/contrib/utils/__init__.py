"""Key-value stores, under the original's module names."""

from __future__ import annotations

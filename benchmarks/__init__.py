"""Measurements. Run them as modules: `python -m benchmarks.overhead`."""

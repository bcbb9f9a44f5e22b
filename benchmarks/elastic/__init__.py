"""Accidents in an emulated cluster: `python -m benchmarks.elastic`."""

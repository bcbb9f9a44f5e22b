"""Faults in an emulated cluster while a training runs on: `python -m benchmarks.faults`."""

"""The figures of the documentation, made from dated results: `python -m benchmarks.figures`."""

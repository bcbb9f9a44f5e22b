"""Does tuning find what there is? `python -m benchmarks.autotune` and, for searches, `... .autotune.replay`."""

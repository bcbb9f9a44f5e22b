"""Measurements. Run them as modules: `python -m benchmarks.overhead`. `results/README.md` lists what they gave."""

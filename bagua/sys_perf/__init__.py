"""Images per second of known models on synthetic data: `bagua_sys_perf` and examples/synthetic_benchmark.py."""

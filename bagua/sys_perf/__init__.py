"""Images per second of known models on made-up data: `bagua_sys_perf` and examples/synthetic_benchmark.py."""

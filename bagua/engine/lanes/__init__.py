"""Lanes: threads and streams with process groups of their own, on which exchanges run beside training."""

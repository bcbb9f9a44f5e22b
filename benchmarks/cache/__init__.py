"""Cached datasets: what the first epoch costs and what later ones save, beside other caches."""

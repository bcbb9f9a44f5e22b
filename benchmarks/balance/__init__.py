"""How evenly samplers share the work among ranks, and what that brings."""

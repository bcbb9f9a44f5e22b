"""Run the examples of the original Bagua, unchanged but for device and data, on today's package."""

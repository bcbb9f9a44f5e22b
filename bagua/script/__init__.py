"""Command-line programs that the original had under this name."""

"""The `bagua` command."""

"""Launchers: `python -m bagua.distributed.run` and `python -m bagua.distributed.launch`."""

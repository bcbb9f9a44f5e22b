"""Bagua-Net: a network plugin for NCCL that moves each connection's bytes over as many TCP flows as fill the link.

    import bagua.net
    bagua.net.enable()  # before NCCL starts: before the process group is made

NCCL loads the library by itself, so that a script need not know of it: `bagua run --enable-bagua-net train.py`.
"""

from __future__ import annotations

from bagua.net.plugin import enable, environment, plugin_path

__all__ = ["enable", "environment", "plugin_path"]

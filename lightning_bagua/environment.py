"""Where the original had the class: `from lightning_bagua.environment import BaguaEnvironment`."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

__all__ = ["BaguaEnvironment"]

_MODULES = {"lightning": "lightning.fabric", "pytorch_lightning": "lightning_fabric"}
_served = [name for name in _MODULES if name in sys.modules] or [name for name in _MODULES if find_spec(name)]
_Base: Any = import_module(f"{_MODULES[_served[0]]}.plugins.environments").TorchElasticEnvironment


class BaguaEnvironment(_Base):
    """Ranks that a launcher has started: `bagua run`, `python -m bagua.distributed.launch` or torchrun.

    Lightning finds those by itself; scripts that pass this object to a strategy go on.
    """

    @property
    def creates_processes_externally(self) -> bool:
        """True: the launcher has done so."""
        return True

    @property
    def main_address(self) -> str:
        """MASTER_ADDR."""
        return os.environ.get("MASTER_ADDR", "127.0.0.1")

    @property
    def main_port(self) -> int:
        """MASTER_PORT."""
        return int(os.environ.get("MASTER_PORT", -1))

    @property
    def service_port(self) -> int:
        """BAGUA_SERVICE_PORT, or -1. Without effect: there is no server."""
        return int(os.environ.get("BAGUA_SERVICE_PORT", -1))

    @staticmethod
    def detect() -> bool:
        """Whether the original's launcher, or torchrun or `bagua run`, started this process."""
        return "BAGUA_SERVICE_PORT" in os.environ or bool(_Base.detect())

    def node_rank(self) -> int:
        """GROUP_RANK, or NODE_RANK."""
        return int(os.environ.get("GROUP_RANK", os.environ.get("NODE_RANK", 0)))

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Nothing to check: the launcher's number of ranks holds."""

"""A deterministic simulation of hosts that run `bagua.membership.Agent` and train, on a network that fails.

One seed is one run: message delays, losses, repetitions and reordering; hosts killed between any two actions, restarted
with or without their record, stopped and resumed; partitions, one-way ones too; hosts that join and leave. Every
message passes through its encoding. The invariants are checked as the run goes, and a violation prints the end of its
trace.
"""

from __future__ import annotations

from tests.elastic.protocol_simulation.cluster import Cluster, simulate
from tests.elastic.protocol_simulation.invariants import Violation

__all__ = ["Cluster", "Violation", "simulate"]

"""Run many ranks in one process, one at a time: convergence studies without a cluster."""

from __future__ import annotations

from bagua.simulation.simulate import Simulation, simulate

__all__ = ["Simulation", "simulate"]

"""The cluster that a plan is for, and what an exchange costs there beside the link."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["CPU", "GPU", "Cluster", "Costs"]


@dataclass(frozen=True)
class Cluster:
    """Equal hosts with equal devices.

    Attributes:
        hosts: number of hosts.
        devices: of each host; a rank each.
        bandwidth: of a host's link for payload, in bits per second each way; infinite for no limit.
        latency: from one host to another, one way, in seconds.
        inner_bandwidth: between devices of a host, in bits per second each way and device.
        inner_latency: between devices of a host, one way, in seconds.
        cores: CPU cores that a rank has for exchanges.
        slowest: speed of the slowest host; 1 if all are alike.
        ring_share, mesh_share: of `bandwidth` that hosts have where each sends to the next one only, and where each
            sends to all others at once; below 1 where pairs of hosts have slower ways than the hosts' own links.

    Raises:
        ValueError: names the argument that is wrong.

    Examples:
        >>> bagua.plan.Cluster(hosts=16, devices=8, bandwidth=10e9, latency=1e-4).ranks
        128
    """

    hosts: int
    devices: int = 1
    bandwidth: float = math.inf
    latency: float = 0.0
    inner_bandwidth: float = math.inf
    inner_latency: float = 0.0
    cores: float = 4.0
    slowest: float = 1.0
    ring_share: float = 1.0
    mesh_share: float = 1.0

    def __post_init__(self) -> None:
        for name in ("hosts", "devices"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: expected a positive int, got {value!r}")
        for name in ("bandwidth", "inner_bandwidth", "cores", "slowest", "ring_share", "mesh_share"):
            value = getattr(self, name)
            if not value > 0:
                raise ValueError(f"{name}: expected a number > 0, got {value!r}")
        for name in ("latency", "inner_latency"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected seconds >= 0, got {value!r}")
        if self.slowest > 1:
            raise ValueError(f"slowest: expected a speed in (0, 1], got {self.slowest!r}")
        for name in ("ring_share", "mesh_share"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}: expected a share in (0, 1], got {getattr(self, name)!r}")

    @property
    def ranks(self) -> int:
        """Hosts times devices."""
        return self.hosts * self.devices


@dataclass(frozen=True)
class Costs:
    """What an exchange costs beside bytes over a link.

    Attributes:
        link_efficiency: payload's share of a link's rate when one flow at a time fills it, as in a ring.
        mesh_efficiency: the same when all ranks send to all others at once: flows share a link unevenly, and an
            exchange ends with its slowest flow.
        wire_s_per_byte: CPU seconds to send a byte and to receive one.
        message_s: CPU seconds of a message: a request, a thread that wakes up.
        wake_s: from the arrival of a message to what is sent in answer, where nothing is computed.
        element_s: CPU seconds in which a codec reads or writes an fp32 element once.
        matmul_s_per_flop: CPU seconds of a floating-point operation in a matrix product (PowerSGD).
        search_s: CPU seconds to search a trellis of 32 states for the code of an element (`eden`).

    Examples:
        >>> from dataclasses import replace
        >>> slow_messages = replace(bagua.plan.CPU, message_s=1e-3)
    """

    link_efficiency: float
    mesh_efficiency: float
    wire_s_per_byte: float
    message_s: float
    wake_s: float
    element_s: float
    matmul_s_per_flop: float
    search_s: float = 6e-9


# `python -m benchmarks.plan --fit`, rounded; `python -m benchmarks.plan` shows what they are worth on other cells.
CPU = Costs(
    link_efficiency=0.94,
    mesh_efficiency=0.86,
    wire_s_per_byte=0.6e-9,
    message_s=0.07e-3,
    wake_s=1.3e-3,
    element_s=0.56e-9,
    matmul_s_per_flop=1.0 / 35e9,
    search_s=6e-9,  # `python -m benchmarks.codecs`
)

# NCCL moves bytes without the CPU; kernels read and write at 1 TB/s. Only the search is measured.
GPU = Costs(
    link_efficiency=0.95,
    mesh_efficiency=0.9,
    wire_s_per_byte=0.0,
    message_s=5e-6,
    wake_s=20e-6,
    element_s=8e-12,
    matmul_s_per_flop=1.0 / 10e12,
    search_s=1.5e-10,  # `make gpu PART=rates` on an H100: benchmarks/results/2026-11-28-gpu
)

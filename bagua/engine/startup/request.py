"""The arguments of `distribute` on one rank: checked, described for the other ranks, and as the engine's settings."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bagua.algorithms.auto import get_or_auto
from bagua.algorithms.base import Algorithm
from bagua.algorithms.registry import registry
from bagua.autotune import Autotune, as_options
from bagua.comm.mesh_connect import CONGESTION, congestion_control
from bagua.comm.store_team import encode
from bagua.comm.transport import FAR_LANES_OF_SUMS, FAR_S, NEAR_LANES_OF_SUMS, chosen_transport
from bagua.engine.buffers import check_broadcast
from bagua.engine.config import EngineConfig
from bagua.engine.guard import Guard
from bagua.engine.reducer.bucketing import (
    check_bucket_bytes,
    check_num_lanes,
    chunks_of,
    default_num_lanes,
    fitting_bucket_bytes,
    lanes_are_given,
    lanes_of_wide,
)
from bagua.engine.reducer.sparse import check_sparse
from bagua.engine.startup.conflicts import check_shared, check_wrapped
from bagua.engine.startup.inventory import Inventory, as_optimizers, take_inventory
from bagua.engine.startup.link_probe import Links
from bagua.engine.startup.optimizer_outline import subclasses
from bagua.engine.startup.options import check_options
from bagua.engine.startup.rank_order import check_rank_order, check_routes
from bagua.engine.startup.sharded import check_sharded
from bagua.engine.startup.shared_memory import check_memory

__all__ = ["Request"]


@dataclass
class Request:
    """What one rank asks for. `check` fills the other attributes in; those behind a wrong argument stay as they are.

    Attributes:
        rank_order: as `check_rank_order` returns it.
        routes: as `check_routes` returns it.
        arrangement_is_default: the user left `rank_order` and `routes` open.
        chooses_lanes: the user left `num_lanes` open.
        fits_buckets: the user left `bucket_bytes` open.
        algorithm: what exchanges.
        optimizers: checked.
        inventory: the module's tensors.
        tune: how to tune the settings, or None.
        subclasses: tensor subclasses in the optimizers' state.
        tolerates_over: the backend with which ranks may be lost; None: they may not.
    """

    bucket_bytes: int | None
    num_lanes: int | None
    guard: Guard | None
    broadcast_buffers: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    rank_order: Any = None
    routes: str | None = None
    arrangement_is_default: bool = True
    transport: str | None = None
    chooses_lanes: bool = False
    fits_buckets: bool = False
    algorithm: Algorithm | None = None
    optimizers: tuple[torch.optim.Optimizer, ...] = ()
    inventory: Inventory | None = None
    tune: Autotune | None = None
    subclasses: list[Any] = field(default_factory=list)
    tolerates_over: str | None = None

    def check(
        self, module: nn.Module, optimizers: Any, algorithm: str | Algorithm, options: dict[str, Any], autotune: Any
    ) -> None:
        """Check all arguments and fill the defaults in. No communication.

        Raises:
            ValueError, TypeError: an argument is wrong; the message names it.
        """
        check_options(algorithm, options)
        chosen = self.algorithm = get_or_auto(registry, algorithm, options)
        if self.bucket_bytes is not None:
            check_bucket_bytes(self.bucket_bytes)
        self.chooses_lanes = self.num_lanes is None and not lanes_are_given()
        self.num_lanes = default_num_lanes() if self.num_lanes is None else check_num_lanes("num_lanes", self.num_lanes)
        if not isinstance(self.guard, Guard | None):
            raise TypeError(f"guard: expected a bagua.Guard or None, got {type(self.guard).__name__}")
        for name in ("broadcast_buffers", "static_graph", "gradient_as_bucket_view"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(f"{name}: expected True or False, got {value!r}")
        self.arrangement_is_default = self.rank_order is None and self.routes is None
        self.rank_order = check_rank_order(self.rank_order)
        self.routes = check_routes(self.routes)
        self.transport = chosen_transport(self.transport)
        self.tune = as_options(autotune)
        if self.broadcast_buffers:
            check_broadcast(chosen)
        items = self.optimizers = as_optimizers(optimizers)
        check_wrapped(module)
        inventory = self.inventory = take_inventory(module, items, chosen.payload)
        self.fits_buckets = self.bucket_bytes is None
        if self.bucket_bytes is None:
            self.bucket_bytes = fitting_bucket_bytes(inventory.trainable_bytes)
        check_shared(module, inventory)
        check_sharded(items, chosen)
        chosen.check(inventory.trainable, items)
        chosen.check_sparse(inventory.sparse, items)
        chosen = self.algorithm = chosen.for_optimizers(items)
        fallback = self.guard.fallback_on(((0,),)) if self.guard is not None else None
        check_sparse(inventory.sparse, chosen, fallback)
        check_memory(inventory, chosen, fallback)
        self.subclasses = subclasses(items, [*inventory.parameters.values(), *inventory.frozen.values()])

    def fit_buckets(self, algorithm: Algorithm, nodes: Sequence[Sequence[int]]) -> None:
        """Fit the size of buckets to the ranks, unless it was given; the result is the same on all ranks.

        Args:
            algorithm: fitted to the nodes.
            nodes: the ranks of each.
        """
        if self.fits_buckets:
            assert self.inventory is not None
            self.bucket_bytes = fitting_bucket_bytes(self.inventory.trainable_bytes, chunks_of(algorithm, nodes))

    def signature(self) -> list[Any]:
        """The module's tensors, to compare between ranks."""
        return self.inventory.signature() if self.inventory is not None else []

    def describe(self, complete: bool) -> dict[str, str]:
        """All options as text, to compare between ranks.

        Args:
            complete: nothing was found wrong.
        """
        options = {
            "algorithm": repr(self.algorithm),
            "bucket_bytes": str(self.bucket_bytes),
            "num_lanes": f"{self.num_lanes} by default" if self.chooses_lanes else str(self.num_lanes),
            "guard": repr(self.guard),
            "broadcast_buffers": str(self.broadcast_buffers),
            "static_graph": str(self.static_graph),
            "gradient_as_bucket_view": str(self.gradient_as_bucket_view),
            "rank_order": repr(self.rank_order),
            "routes": self.routes or "the default",
            "transport": self.transport or "the default",
            CONGESTION: congestion_control() or "the kernel's choice",
            "fault_tolerant": f"over {self.tolerates_over}" if self.tolerates_over else "off",
            "autotune": repr(self.tune),
            "optimizers": ", ".join(
                f"{type(item).__name__} of {len(item.param_groups)} groups" for item in self.optimizers
            )
            or "none",
        }
        if complete:
            kinds = hashlib.sha256(encode(self.subclasses)).hexdigest() if self.subclasses else "none"
            options["tensor subclasses in the optimizers' state"] = kinds
        return options

    def config(
        self,
        num_lanes: int,
        links: Links,
        tunes_hierarchy: bool,
        size: int,
        native: bool,
        flat: Algorithm | None = None,
        tries_sites: bool = False,
    ) -> EngineConfig:
        """The engine's settings.

        Args:
            num_lanes: that may share the exchanges.
            links: as measured; the number of lanes is unused if the user chose one.
            tunes_hierarchy, flat, tries_sites: see `EngineConfig`.
            size: number of ranks.
            native: the native transport connects them.
        """
        assert self.bucket_bytes is not None and self.num_lanes is not None
        lanes_of_sums = links.lanes_of_sums
        if num_lanes > self.num_lanes:  # high latency; only exchanges of few bits gain by more
            most = min(self.num_lanes, FAR_LANES_OF_SUMS) if native else self.num_lanes
            lanes_of_sums = min(lanes_of_sums or most, most)
        elif native and links.slow and not (self.tolerates_over and links.round_trip_s >= FAR_S):  # no more lanes there
            lanes_of_sums = NEAR_LANES_OF_SUMS
        return EngineConfig(
            self.bucket_bytes,
            num_lanes,
            lanes_of_sums=lanes_of_sums if self.chooses_lanes else None,
            lanes_of_wide=lanes_of_wide(self.bucket_bytes, size, links.held_bytes) if self.chooses_lanes else None,
            straight_chunk_bytes=links.straight_chunk_bytes,
            bdp_bytes=links.bdp_bytes,
            guard=self.guard,
            broadcast_buffers=self.broadcast_buffers,
            static_graph=self.static_graph,
            gradient_as_bucket_view=self.gradient_as_bucket_view,
            tunes_hierarchy=tunes_hierarchy,
            flat=flat,
            tries_sites=tries_sites,
        )

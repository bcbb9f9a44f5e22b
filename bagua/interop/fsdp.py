"""Codecs and exchanges within FSDP2 (`torch.distributed.fsdp.fully_shard`).

Legend: R = ranks that share one replica, C = elements of one rank's shard, c = those of one parameter
in it, W = bytes of one wire row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bagua import codecs
from bagua.algorithms import Algorithm
from bagua.algorithms.feedback import fit_feedback
from bagua.codecs import Codec
from bagua.comm.backend_kind import backend_kind
from bagua.comm.buffers import Buffers
from bagua.comm.collectives import all_gather_rows, all_to_all_rows
from bagua.comm.groups import Group, Groups, Meter
from bagua.comm.staged import Staged
from bagua.comm.team import Team
from bagua.engine.startup.broadcast import replicate_tensors
from bagua.exchanges import Exchange, PowerSGD
from bagua.interop.choice import choose, open_groups
from bagua.interop.fsdp_params import ReducedParams, without_wrappers
from bagua.interop.fsdp_replica import Replica

__all__ = ["CompressedFSDP", "compress_fsdp"]

_HOOKS = {
    "reduce_scatter": "set_custom_reduce_scatter",
    "all_gather": "set_custom_all_gather",
    "replica": "set_all_reduce_hook",
}


def compress_fsdp(
    model: nn.Module,
    *,
    reduce_scatter: str | Codec | None = None,
    all_gather: str | Codec | None = None,
    replica: str | Algorithm | Exchange | None = None,
    replica_group: Any = None,
    error_feedback: bool | None = None,
) -> CompressedFSDP:
    """Compress the communication of FSDP2 modules in `model`. Collective; call it after `fully_shard`.

    Args:
        model: has `fully_shard` been applied to, to itself or to parts of it.
        reduce_scatter: codec of the gradients on their way to the ranks that own them; summed in fp32.
        all_gather: codec of the weights on their way to all ranks. The owner keeps them in full precision; all ranks
            compute with the same decoded ones.
        replica: how replicas average the gradients that they own: what `ddp_hook` takes, but not "power_sgd", whose
            matrices are cut here. For hybrid sharding with `fully_shard(model, mesh=mesh["shard"])`, whose replicas
            torch does not know of.
        replica_group: the ranks that own the same shard: `mesh["replicate"]`, or a `ProcessGroup`. Their weights
            become those of its first rank.
        error_feedback: add what `reduce_scatter` lost to the next gradients; None does so for "top_k" and for
            biased codecs with less than 8 bits per element.

    Returns:
        The state of error feedback, and the bytes sent; checkpoints take it as they take an optimizer.

    Raises:
        RuntimeError: this torch has no such hook, or does not show what FSDP reduces; names it.
        TypeError, ValueError: an argument is wrong.
        CommunicationError: a replica did not come.

    Examples:
        >>> from torch.distributed.fsdp import fully_shard
        >>> sharded = fully_shard(torch.nn.Linear(10, 1))
        >>> state = bagua.interop.compress_fsdp(sharded, reduce_scatter="int4", all_gather="bf16")
        >>> sharded(inputs).square().mean().backward()
    """
    modules = _sharded(model, {"reduce_scatter": reduce_scatter, "all_gather": all_gather, "replica": replica})
    made = CompressedFSDP()
    paths = {id(module): without_wrappers(path) for path, module in model.named_modules()}
    if reduce_scatter is not None:
        codec = codecs.get(reduce_scatter)
        feedback = fit_feedback(error_feedback, codec)
        if feedback and (codec.lossless or codec.linear):
            raise ValueError(f"error_feedback=True cannot be combined with codec {codec.name!r}")
        for path, module in modules.items():
            params = ReducedParams(module, paths) if feedback else None
            made.scatters[path] = _ReduceScatter(codec, params, made.meter)
            module.set_custom_reduce_scatter(made.scatters[path])
    elif error_feedback:
        raise ValueError("error_feedback=True needs a lossy codec for reduce_scatter")
    if all_gather is not None:
        codec = codecs.get(all_gather)
        for module in modules.values():
            module.set_custom_all_gather(_AllGather(codec, made.meter))
    if replica is not None:
        _join_replicas(model, modules, paths, made, replica, replica_group)
    elif replica_group is not None:
        raise ValueError("replica_group is given without replica; pass the exchange that averages the replicas")
    return made


class CompressedFSDP:
    """Handle returned by `compress_fsdp`. `state_dict` differs between ranks: save it on every rank.

    Attributes:
        meter: bytes that this rank's compressed collectives sent and received.
    """

    def __init__(self) -> None:
        self.meter = Meter()
        self.scatters: dict[str, _ReduceScatter] = {}
        self.replicas: dict[str, Replica] = {}
        self._groups: Groups | None = None

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent so far."""
        return self.meter.sent + sum(meter.sent for meter in (self._groups.meters if self._groups else ()))

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Residuals by parameter and exchange states by sets of parameters, of each sharded module; copies."""
        return {
            "residuals": {
                path: {name: tensor.clone() for name, tensor in each.residuals.items()}
                for path, each in self.scatters.items()
            },
            "replicas": {path: each.state_dict() for path, each in self.replicas.items()},
        }

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` returned on this rank.

        Raises:
            ValueError: it was made for other modules or other arguments, or does not say for which parameters.
        """
        found = dict[str, dict[str, Any]]()
        for name, mine in (("residuals", self.scatters), ("replicas", self.replicas)):
            saved = state_dict.get(name)
            if saved is not None:  # earlier versions named wrappers
                found[name] = {path if path in mine else without_wrappers(path): each for path, each in saved.items()}
            if saved is None or found[name].keys() != mine.keys():
                raise ValueError(f"state dict: {name} do not match this model and these arguments")
        for path, tensors in found["residuals"].items():
            self.scatters[path].load(tensors, path)
        for path, states in found["replicas"].items():
            self.replicas[path].load(states, path)


def _sharded(model: nn.Module, wanted: Mapping[str, object]) -> dict[str, Any]:
    """The FSDP2 modules by path.

    Raises:
        RuntimeError, TypeError, ValueError: see `compress_fsdp`.
    """
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    asked = [name for name, value in wanted.items() if value is not None]
    if not asked:
        raise ValueError("compress_fsdp: pass at least one of reduce_scatter, all_gather and replica")
    for name in asked:
        if not hasattr(FSDPModule, _HOOKS[name]):
            raise RuntimeError(
                f"{name}: torch {torch.__version__} has no FSDPModule.{_HOOKS[name]}(); Bagua needs 2.11"
            )
    modules = dict[str, Any]()
    for path, module in model.named_modules():
        if isinstance(module, FSDPModule):
            plain = without_wrappers(path)
            modules[path if plain in modules else plain] = module  # a wrapper and what is in it may both be sharded
    if not modules:
        raise ValueError("model: nothing in it is sharded; call torch.distributed.fsdp.fully_shard() first")
    return modules


def _join_replicas(
    model: nn.Module,
    modules: Mapping[str, Any],
    paths: Mapping[int, str],
    made: CompressedFSDP,
    replica: str | Algorithm | Exchange,
    replica_group: Any,
) -> None:
    chosen = choose(replica, {})
    if isinstance(chosen, PowerSGD) or getattr(chosen, "name", "") == "power_sgd":
        raise ValueError("replica: 'power_sgd' needs whole matrices, but a shard holds parts of them")
    if replica_group is None:
        raise ValueError(
            "replica_group: pass the group of ranks that own the same shard, for example mesh['replicate']"
        )
    params: list[Any] = [param for param in model.parameters() if hasattr(param, "to_local")]
    if any(placement.is_replicate() for param in params for placement in param.placements):
        raise ValueError(
            "replica: torch averages these replicas itself, in full precision; shard over one mesh dimension, "
            "fully_shard(model, mesh=mesh['shard']), and pass replica_group=mesh['replicate']"
        )
    device = params[0].to_local().device
    team = Team.of(replica_group, device)
    made._groups, exchange_for = open_groups(team, chosen, "bagua.interop.compress_fsdp()", device)
    replicate_tensors([param.to_local() for param in params], made._groups.world, device)
    for path, module in modules.items():
        made.replicas[path] = Replica(exchange_for, made._groups, ReducedParams(module, paths))
        module.set_all_reduce_hook(made.replicas[path])


class _Comm:
    """Base of the two classes below: Bagua's group around FSDP's, scratch memory, and allocation."""

    def __init__(self, codec: Codec, meter: Meter) -> None:
        self.codec = codec
        self._meter, self._buffers = meter, Buffers()
        self._wrapped: tuple[dist.ProcessGroup, Group] | None = None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """As torch does by default."""
        return torch.empty(*size, dtype=dtype, device=device)

    def _group(self, pg: dist.ProcessGroup, device: torch.device) -> Group:
        if self._wrapped is None or self._wrapped[0] is not pg:
            backend = pg._get_backend(device)
            name, ranks = backend_kind(backend), tuple(range(pg.size()))
            carrier = Staged(backend) if name == "gloo" and device.type == "cuda" else backend
            self._wrapped = pg, Group(carrier, pg.rank(), pg.size(), ranks, name, self._meter)
        return self._wrapped[1]

    def _wire(self, name: str, rows: int, n: int, like: Tensor) -> Tensor:
        width = self.codec.wire_bytes(n, like.dtype)
        if like.is_cuda:
            # FSDP gathers on its own streams or on the current one, and does not order these among each other: what one
            # stream still reads, another must not write.
            name = f"{name} {torch.cuda.current_stream(like.device).cuda_stream}"
        return self._buffers.get(name, (rows, width), torch.uint8, like.device)


class _ReduceScatter(_Comm):
    """Reduce-scatter with a codec: every rank encodes its gradients of each shard; the owner decodes and sums them."""

    def __init__(self, codec: Codec, params: ReducedParams | None, meter: Meter) -> None:
        super().__init__(codec, meter)
        self.residuals: dict[
            str, Tensor
        ] = {}  # by parameter, [R c]; of those in `_names` they are columns of `_flat_RC`
        self._params = params  # None without error feedback
        self._names: tuple[str, ...] = ()
        self._flat_RC: Tensor | None = None

    def load(self, saved: Mapping[str, Tensor] | Mapping[int, Tensor], path: str) -> None:
        """Take copies of residuals.

        Raises:
            ValueError: they do not fit the module `path`.
        """
        residuals: dict[str, Tensor] = {}
        if self._params is not None:
            widths = self._params.widths
            for key, tensor in saved.items():
                if isinstance(key, str):
                    names = self._params.names_of([key], path)
                else:  # by number of elements of all ranks' shards, as earlier versions saved it
                    names = self._params.all_of(key // len(tensor), path)
                parts = [widths[name] for name in names]
                if tensor.shape[-1] != sum(parts):
                    raise ValueError(
                        f"state dict: the residual of {', '.join(names)} has {tensor.shape[-1]} elements of each "
                        f"rank's shard, not {sum(parts)}"
                    )
                residuals.update(zip(names, (part.clone() for part in tensor.split(parts, dim=1)), strict=True))
        self.residuals, self._names, self._flat_RC = residuals, (), None

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Shapes: input_tensor is [R C], output_tensor [C]. Done, or enqueued on the current stream, on return."""
        mine = self._group(group, input_tensor.device)
        size, n = mine.size, output_tensor.numel()
        x_RC = input_tensor.view(size, n)
        wire_RW, peers_RW = self._wire("wire", size, n, x_RC), self._wire("peers", size, n, x_RC)
        if self._params is not None:
            self.codec.encode_with_feedback(x_RC, self._residual(x_RC, self._params), out=wire_RW)
        else:
            self.codec.encode(x_RC, out=wire_RW)
        all_to_all_rows(mine, peers_RW, wire_RW)
        self.codec.decode_mean(peers_RW, n, out=output_tensor, weight=_weight(op, size))

    def _residual(self, x_RC: Tensor, params: ReducedParams) -> Tensor:
        """What was lost of the gradients of the parameters in `x_RC`, whichever others were reduced with them then."""
        names, flat_RC = params.of_shard(x_RC.shape[1]), self._flat_RC
        same = names == self._names
        if flat_RC is None or not same or (flat_RC.dtype, flat_RC.device) != (x_RC.dtype, x_RC.device):
            widths = [params.widths[name] for name in names]
            kept = zip(names, x_RC.split(widths, dim=1), strict=True)
            flat_RC = torch.cat(
                [
                    self.residuals[name].to(x_Rc) if name in self.residuals else torch.zeros_like(x_Rc)
                    for name, x_Rc in kept
                ],
                dim=1,
            )
            for name in set(self._names).difference(names):  # or all of the old tensor would stay in memory
                self.residuals[name] = self.residuals[name].clone()
            self.residuals.update(zip(names, flat_RC.split(widths, dim=1), strict=True))
            self._names, self._flat_RC = names, flat_RC
        return flat_RC


class _AllGather(_Comm):
    """All-gather with a codec: the owner encodes its shard once; all ranks, the owner too, use the decoded values."""

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Shapes: input_tensor is [C], a part of output_tensor [R C]. Done or enqueued on return, never async.

        Raises:
            ValueError: the parameters of one FSDP module have several dtypes, of which torch makes bytes.
        """
        if not input_tensor.is_floating_point():
            raise ValueError(
                f"all_gather: codec {self.codec.name!r} needs parameters of one floating dtype in each sharded module, "
                f"got {input_tensor.dtype}"
            )
        mine = self._group(group, input_tensor.device)
        rank, size, n = mine.rank, mine.size, input_tensor.numel()
        wire_RW = self._wire("wire", size, n, input_tensor)
        self.codec.encode(input_tensor.view(1, n), out=wire_RW[rank : rank + 1])
        all_gather_rows(mine, wire_RW)
        self.codec.decode(wire_RW, n, out=output_tensor.view(size, n))


def _weight(op: Any, size: int) -> float:
    """Factor of the sum.

    Raises:
        ValueError: an operation that is neither sum nor mean.
    """
    if op == dist.ReduceOp.AVG:
        return 1.0 / size
    if op == dist.ReduceOp.SUM:
        return 1.0
    if op == dist.ReduceOp.PREMUL_SUM and hasattr(op, "__getstate__"):
        return float(op.__getstate__()[1])  # how it pickles: (kind, factor)
    raise ValueError(f"reduce_scatter: operation {op} is not supported with a codec")

"""The MoE layer: gate, all-to-all, experts, all-to-all.

Legend: S = tokens of this rank, M = elements of a token, T = rows sent, U = rows received, R = ranks,
n = experts of a rank, E = R n experts.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bagua import codecs
from bagua.codecs import Codec
from bagua.moe.experts import Experts
from bagua.moe.gate import TopKGate
from bagua.moe.routing import Routing
from bagua.moe.spread import Spread
from bagua.moe.token_exchange import exchange_tokens

__all__ = ["MOELayer", "MoE"]

_GRADIENTS = ("mean", "sum")


class MOELayer(nn.Module):
    """`MoE` without dropout. Its submodules have the names of Bagua 0.9's checkpoints.

    Attributes:
        l_aux: the load-balancing loss of the last forward pass; differentiable. None before.
        exp_counts: [E] int64 on the CPU: tokens of this rank whose first choice each expert was.
        num_dropped: choices of this rank's tokens that found their expert full.
        num_rows: rows that each of this rank's experts got, from all ranks.

    Examples:
        >>> gate = bagua.moe.TopKGate(model_dim=8, num_experts=2)
        >>> experts = bagua.moe.Experts(torch.nn.Linear(8, 8), num_local_experts=2)
        >>> layer = bagua.moe.MOELayer(gate, experts, num_local_experts=2)
    """

    _untraced: ClassVar[Any] = None

    def __init__(
        self,
        gate: TopKGate,
        experts: Experts,
        num_local_experts: int,
        group: Any = None,
        *,
        codec: Codec | None = None,
        grad_codec: Codec | None = None,
        gradient: str = "mean",
        spread: Spread | None = None,
    ) -> None:
        super().__init__()
        self.gate = gate
        self.experts = experts
        self.num_local_experts = num_local_experts
        self.spread = spread or Spread(group)
        self.world_size = self.spread.size
        self.codec, self.grad_codec, self.gradient = codec, grad_codec, gradient
        self.l_aux: Tensor | None = None
        self.exp_counts: Tensor | None = None
        self.num_dropped = 0
        self.num_rows: list[int] = []
        if MOELayer._untraced is None:
            # Sizes depend on values, and groups of our own cannot be traced. Not as a decorator: that imports the
            # compiler.
            MOELayer._untraced = staticmethod(torch.compiler.disable(_run))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "l_aux": None}  # a tensor of a graph, which cannot be copied

    def forward(self, input: Tensor, used_token: Tensor | None = None) -> Tensor:
        """Return the experts' weighted outputs for `input` [..., M], in its shape; 0 for tokens without an expert."""
        width = self.gate.wg.in_features
        if input.dim() < 1 or input.shape[-1] != width:
            raise ValueError(f"hidden_states: expected [..., {width}], got {list(input.shape)}")
        if not input.is_floating_point():
            raise ValueError(f"hidden_states: expected floating-point numbers, got {input.dtype}")
        run = MOELayer._untraced or _run
        return run(self, input.reshape(-1, width), used_token).view(input.shape)


def _run(layer: MOELayer, x_SM: Tensor, used_token: Tensor | None) -> Tensor:
    routing: Routing = layer.gate(x_SM, used_token)
    layer.l_aux, layer.exp_counts, layer.num_dropped = routing.l_aux, routing.exp_counts, routing.num_dropped
    rows_TM = x_SM.index_select(0, routing.token_T)
    answers_TM = _ask(layer, rows_TM, routing.rows_E)
    out_SM = answers_TM.new_zeros(x_SM.shape)
    weighted_TM = answers_TM * routing.weight_T.to(answers_TM.dtype).unsqueeze(1)
    for choice in range(layer.gate.k):
        # A token occurs once here, so that sums do not depend on the order in which a GPU adds.
        place = (routing.choice_T == choice).nonzero().squeeze(1)
        out_SM = out_SM.index_add(0, routing.token_T[place], weighted_TM[place])
    return out_SM


def _ask(layer: MOELayer, rows_TM: Tensor, rows_E: tuple[int, ...]) -> Tensor:
    """The experts' answers to rows that are sorted by expert."""
    spread, n = layer.spread, layer.num_local_experts
    counts_Rn = spread.count(rows_E, rows_TM)
    layer.num_rows = [sum(row[local] for row in counts_Rn) for local in range(n)]
    if spread.size == 1:
        return layer.experts(rows_TM, layer.num_rows)
    to = tuple(sum(rows_E[rank * n : (rank + 1) * n]) for rank in range(spread.size))
    fro = tuple(sum(row) for row in counts_Rn)
    # An expert sees rows of all ranks, each with the gradient of its own rank's loss. On the way in the gradient is
    # divided by R, so that the expert's is that of the mean loss; on the way out the tokens' own is restored.
    divisor = float(spread.size) if layer.gradient == "mean" else 1.0
    rows_UM = exchange_tokens(rows_TM, spread, to, fro, layer.codec, layer.grad_codec, divisor)
    order_U, back_U = _by_expert(counts_Rn, rows_UM.device)
    if order_U is not None:
        rows_UM = rows_UM.index_select(0, order_U)
    answers_UM = layer.experts(rows_UM, layer.num_rows)
    if back_U is not None:
        answers_UM = answers_UM.index_select(0, back_U)
    return exchange_tokens(answers_UM, spread, fro, to, layer.codec, layer.grad_codec, 1.0 / divisor)


def _by_expert(counts_Rn: list[list[int]], device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """The order that brings rows sorted by rank, then expert, to expert, then rank; and the way back."""
    n = len(counts_Rn[0])
    if n == 1:
        return None, None
    expert_U = torch.arange(n, device="cpu").repeat(len(counts_Rn))
    expert_U = expert_U.repeat_interleave(torch.tensor(counts_Rn, device="cpu").flatten())
    order_U = expert_U.argsort(stable=True)
    back_U = torch.empty_like(order_U)
    back_U[order_U] = torch.arange(len(order_U), device="cpu")
    return order_U.to(device), back_U.to(device)


class MoE(nn.Module):
    """Mixture of experts, sharded over the ranks: rank r holds experts r n to r n + n - 1.

    A gate chooses one or two experts for each token. Rows travel to the ranks of their experts and back, and nothing
    else does: places that are not taken are not sent. Each forward pass in training and evaluation is collective, and
    so is each backward pass.

    Make the layer after `bagua.init_process_group()`. `bagua.distribute` leaves the experts to their rank: they are
    neither compared, broadcast nor averaged, whatever the algorithm. Their gradient is that of the mean of the ranks'
    losses, as that of all other parameters is. Without a process group one process holds all experts, which are
    then ordinary parameters.

    Args:
        hidden_size: elements of a token, M.
        expert: rows [T, M] to rows [T, M]; copied for each expert.
        num_local_experts: experts of each rank, n.
        k: experts for a token, 1 or 2.
        output_dropout_prob: of dropout behind the layer.
        capacity_factor: in training an expert takes max(ceil(k S / E * factor), min_capacity) rows of each rank;
            more are dropped.
        eval_capacity_factor: the same in evaluation.
        min_capacity: see there.
        noisy_gate_policy: None, "Jitter" or "RSample"; see `TopKGate`.
        drop_tokens: False: an expert takes all.
        random_token_selection: which tokens are dropped is drawn, in training with k = 1; else the last ones are.
        codec: name or instance of the codec in which rows travel, "minmax_uint8" for 8 bits; None sends them exactly.
        grad_codec: the same for their gradients in the backward pass.
        gradient: "mean": of an expert, that of the mean of the ranks' losses. "sum": of their sum, as Bagua 0.9 has
            it; with algorithms that sum, too.
        process_group: a `ProcessGroup` or one-dimensional `DeviceMesh`, the one of `bagua.distribute`; None for all
            ranks.

    Raises:
        ValueError: an argument is wrong; names it.
        TypeError: `expert` is not a module.

    Bytes: per step with T rows sent to other ranks: 4 T M elements, that is two of T M in the forward and two in the
        backward pass, on average each way; and 8 (R-1) (n + 2) of row counts.
    Source: arXiv:2006.16668 (GShard), arXiv:2101.03961 (Switch Transformer).
    Differs: from Bagua 0.9 in places that are not sent, the gradient's scale, evaluation without noise,
        `min_capacity` and `used_token` with k = 2 too, and fewer tokens than `min_capacity`.

    Examples:
        >>> layer = bagua.moe.MoE(8, torch.nn.Linear(8, 8), num_local_experts=2, k=2)
        >>> output, l_aux, exp_counts = layer(torch.randn(16, 8))
        >>> (output.sum() + 0.01 * l_aux).backward()
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_local_experts: int = 1,
        k: int = 1,
        output_dropout_prob: float = 0.0,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        noisy_gate_policy: str | None = None,
        *,
        drop_tokens: bool = True,
        random_token_selection: bool = True,
        codec: str | Codec | None = None,
        grad_codec: str | Codec | None = None,
        gradient: str = "mean",
        process_group: Any = None,
    ) -> None:
        super().__init__()
        if not isinstance(expert, nn.Module):
            raise TypeError(f"expert: expected a torch.nn.Module, got {type(expert).__name__}")
        if isinstance(num_local_experts, bool) or not isinstance(num_local_experts, int) or num_local_experts < 1:
            raise ValueError(f"num_local_experts: expected an integer >= 1, got {num_local_experts!r}")
        if gradient not in _GRADIENTS:
            raise ValueError(f"gradient: expected one of {_GRADIENTS}, got {gradient!r}")
        spread = Spread(process_group)
        self.num_experts = num_local_experts * spread.size
        gate = TopKGate(
            hidden_size,
            self.num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens=drop_tokens,
            random_token_selection=random_token_selection,
        )
        self.bagua_moe = MOELayer(
            gate,
            Experts(expert, num_local_experts, rank_local=spread.together),
            num_local_experts,
            codec=None if codec is None else codecs.get(codec),
            grad_codec=None if grad_codec is None else codecs.get(grad_codec),
            gradient=gradient,
            spread=spread,
        )
        self.dropout = nn.Dropout(output_dropout_prob)

    def forward(self, hidden_states: Tensor, used_token: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Route each token to its experts.

        Args:
            hidden_states: [..., M].
            used_token: one entry for each token, 0 for those that go to no expert; None for all.

        Returns:
            The output, in the shape of `hidden_states`; the load-balancing loss, to be added to the loss with a small
            factor (0.01); and how many of this rank's tokens chose each expert first, [E] int64 on the CPU.

        Raises:
            RankMismatchError: another rank runs another layer now.
            CommunicationError: a rank is gone; names it.
        """
        output = self.dropout(self.bagua_moe(hidden_states, used_token))
        l_aux, exp_counts = self.bagua_moe.l_aux, self.bagua_moe.exp_counts
        assert l_aux is not None
        assert exp_counts is not None
        return output, l_aux, exp_counts

"""The gates against loops over tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from bagua.moe import Routing, TopKGate, capacity_of, top_1, top_2
from tests.moe import oracle


def logits(tokens: int, experts: int, seed: int) -> Tensor:
    return torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def check(got: Routing, expected: oracle.Expected) -> None:
    assert got.rows_E == tuple(len(rows) for rows in expected.rows)
    flat = [row for rows in expected.rows for row in rows]
    assert got.token_T.tolist() == [token for token, _, _ in flat]
    assert got.choice_T.tolist() == [choice for _, _, choice in flat]
    np.testing.assert_allclose(got.weight_T.numpy(), [weight for _, weight, _ in flat], rtol=1e-12)
    assert got.exp_counts.tolist() == expected.counts
    assert got.exp_counts.dtype is torch.int64
    assert got.l_aux.item() == pytest.approx(expected.l_aux, rel=1e-12)
    assert got.num_dropped == expected.dropped


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("capacity", [1, 3, 100, None])
@pytest.mark.parametrize(("tokens", "experts"), [(17, 4), (5, 8), (9, 1)])
def test_both_gates_against_the_oracle(tokens: int, experts: int, capacity: int | None, seed: int) -> None:
    x, noise = logits(tokens, experts, seed), logits(tokens, experts, 100 + seed)
    generator = torch.Generator().manual_seed(seed)
    priority = torch.rand(tokens, generator=generator)
    used = torch.rand(tokens, generator=generator) < 0.7
    limit = float("inf") if capacity is None else capacity
    for some in (None, used):
        words = None if some is None else some.tolist()
        check(top_1(x, capacity, some), oracle.route(x.numpy(), 1, limit, words))
        drawn = oracle.route(x.numpy(), 1, limit, words, noise.numpy(), priority.tolist())
        check(top_1(x, capacity, some, noise, priority), drawn)
        check(top_2(x, capacity, some), oracle.route(x.numpy(), 2, limit, words))
        check(top_2(x, capacity, some, noise), oracle.route(x.numpy(), 2, limit, words, noise.numpy()))


def test_ties_go_to_the_first_expert_and_full_experts_keep_the_first_tokens() -> None:
    same = torch.zeros(5, 3, dtype=torch.float64)
    check(top_1(same, 2), oracle.route(same.numpy(), 1, 2))
    assert top_1(same, 2).token_T.tolist() == [0, 1]
    got = top_2(same, 2)
    assert (got.rows_E, got.num_dropped) == ((2, 2, 0), 6)
    assert got.weight_T.tolist() == [0.5] * 4


def test_a_full_second_expert_leaves_the_first_with_weight_one() -> None:
    # Token 0 wants experts 0 and 1, token 1 wants 1 and 0: with one place each, both second choices are dropped.
    x = torch.tensor([[2.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    got = top_2(x, 1)
    assert (got.rows_E, got.choice_T.tolist(), got.weight_T.tolist()) == ((1, 1), [0, 0], [1.0, 1.0])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((10, 4, 1.0, 1, 0), 3), ((10, 4, 1.0, 2, 0), 5), ((8, 4, 1.25, 1, 0), 3), ((2, 64, 1.0, 1, 4), 4)],
)
def test_capacity(arguments: tuple[int, int, float, int, int], expected: int) -> None:
    assert capacity_of(*arguments) == expected


def test_no_tokens_give_no_rows_and_a_loss_of_zero_with_a_gradient() -> None:
    for k in (1, 2):
        gate = TopKGate(4, 3, k)
        routing = gate(torch.zeros(0, 4))
        assert (routing.rows_E, routing.num_dropped, routing.l_aux.item()) == ((0, 0, 0), 0, 0.0)
        routing.l_aux.backward()
        assert gate.wg.weight.grad is not None and not gate.wg.weight.grad.any()


def test_the_loss_is_one_where_the_load_is_even_and_pulls_towards_it() -> None:
    even = torch.eye(4, dtype=torch.float64) * 50
    assert top_1(even, None).l_aux.item() == pytest.approx(1.0)
    crowded = torch.tensor([[1.0, 0.0]] * 6, dtype=torch.float64, requires_grad=True)
    routing = top_1(crowded, None)
    assert routing.l_aux.item() > 1
    routing.l_aux.backward()
    assert crowded.grad is not None and (crowded.grad[:, 0] > 0).all() and (crowded.grad[:, 1] < 0).all()


def test_factors_of_training_and_evaluation() -> None:
    gate = TopKGate(2, 2, 1, 1.0, 2.0, 0)
    with torch.no_grad():
        gate.wg.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    x = torch.tensor([[1.0, 0.0]] * 8)
    assert gate(x).rows_E == (4, 0)
    assert gate.eval()(x).rows_E == (8, 0)
    gate.drop_tokens = False
    assert gate.train()(x).num_dropped == 0


def test_dropped_tokens_are_drawn_in_training_only() -> None:
    gate, x = TopKGate(2, 2, 1, 0.5, 0.5, 0), torch.ones(40, 2)
    torch.manual_seed(0)
    drawn = {tuple(gate(x).token_T.tolist()) for _ in range(5)}
    assert len(drawn) == 5 and all(list(each) == sorted(each) for each in drawn)
    gate.random_token_selection = False
    assert gate(x).token_T.tolist() == list(range(10))
    gate.random_token_selection = True
    assert gate.eval()(x).token_T.tolist() == list(range(10))


def test_jitter_moves_the_logits_by_a_hundredth_at_most() -> None:
    gate = TopKGate(8, 4, 1, noisy_gate_policy="Jitter", drop_tokens=False)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    still = gate.eval()(x).l_aux
    assert gate.train()(x).l_aux != still
    with torch.no_grad():
        gate.wg.weight.zero_()[0, 0] = 1
    one = torch.zeros(1000, 8)
    one[:, 0] = 1
    weight = gate(one).weight_T
    low, high = (float(torch.softmax(torch.tensor([1 + e, 0, 0, 0]), 0)[0]) for e in (-0.01, 0.01))
    assert low - 1e-6 <= weight.min() < weight.max() <= high + 1e-6


def test_rsample_draws_experts_by_their_probability() -> None:
    torch.manual_seed(0)
    gate = TopKGate(1, 3, 1, noisy_gate_policy="RSample", drop_tokens=False)
    with torch.no_grad():
        gate.wg.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
    x = torch.ones(20000, 1)
    shares = gate(x).exp_counts / 20000
    assert torch.allclose(shares, torch.softmax(gate.wg.weight[:, 0], 0), atol=0.02)
    assert gate.eval()(x).exp_counts.tolist() == [20000, 0, 0]


def test_the_second_expert_is_drawn_in_training_by_its_probability_among_the_others() -> None:
    torch.manual_seed(0)
    gate = TopKGate(1, 3, 2, drop_tokens=False)
    with torch.no_grad():
        gate.wg.weight.copy_(torch.tensor([[2.0], [1.0], [0.0]]))
    x = torch.ones(20000, 1)
    rows = torch.tensor(gate(x).rows_E) / 20000
    others = torch.softmax(torch.tensor([1.0, 0.0]), 0)
    assert torch.allclose(rows, torch.tensor([1.0, *others.tolist()]), atol=0.02)
    assert gate.eval()(x).rows_E == (20000, 20000, 0)


def test_the_gate_computes_in_fp32_and_leaves_its_weight_alone() -> None:
    gate = TopKGate(8, 4, 2, drop_tokens=False).eval()
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    wide = gate(x.float())
    assert torch.equal(gate(x).weight_T, wide.weight_T)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gate(x).weight_T, wide.weight_T)
    gate.half()
    assert gate(x).weight_T.dtype is torch.float32 and gate.wg.weight.dtype is torch.float16
    assert gate.double()(x.double()).weight_T.dtype is torch.float64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model_dim", 0),
        ("num_experts", 2.0),
        ("k", 3),
        ("capacity_factor", 0),
        ("eval_capacity_factor", float("nan")),
        ("min_capacity", -1),
        ("noisy_gate_policy", "jitter"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: "):
        TopKGate(**{"model_dim": 4, "num_experts": 2, name: value})  # type: ignore[arg-type]


def test_a_mask_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match="used_token: 3 entries for 4 tokens"):
        TopKGate(2, 2)(torch.ones(4, 2), torch.ones(3))

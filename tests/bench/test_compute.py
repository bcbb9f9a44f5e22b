"""Emulated compute takes its time, and gives gradients as autograd would."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from bagua.bench.compute import SPEED_FILE, Compute, EmulatedModel
from bagua.bench.models import Layer, Model

MODEL = Model("small", (Layer("a", ((3, 4), (4,)), 1.0), Layer("b", ((5,),), 2.0), Layer("c", ((6, 1),), 1.0)))


def test_it_takes_its_time_and_no_cpu() -> None:
    model = EmulatedModel(MODEL, Compute(0.4, forward_share=0.25))
    started, cpu = time.perf_counter(), time.process_time()
    loss = model(torch.zeros(1)).sum()
    forward = time.perf_counter()
    loss.backward()
    ended = time.perf_counter()
    assert forward - started >= 0.1
    assert ended - forward >= 0.3
    assert time.process_time() - cpu < 0.2


def test_gradients_come_layer_by_layer_at_their_deadlines() -> None:
    model = EmulatedModel(MODEL, Compute(0.2, forward_share=0.0))
    seen: list[tuple[str, float]] = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: seen.append((name, time.perf_counter())))
    loss = model(torch.zeros(1)).sum()
    started = time.perf_counter()
    loss.backward()
    layers = [name.split(".")[1] for name, _ in seen]
    assert layers == ["2", "1", "0", "0"]
    for (_, at), share in zip(seen, (0.25, 0.75, 1.0, 1.0), strict=True):
        assert at - started >= 0.2 * share - 0.001


class Clock:
    """Stands for the module `time`: sleeping takes as long as it says, and all else takes no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_hooks_that_cost_time_do_not_lengthen_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines count from the start of the pass: 0.2 s of hooks vanish in 0.4 s, where sums would give 0.6."""
    clock = Clock()
    monkeypatch.setattr("bagua.bench.compute.time", clock)
    model = EmulatedModel(MODEL, Compute(0.4, forward_share=0.0))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: clock.sleep(0.05))
    loss = model(torch.zeros(1)).sum()
    started = clock.now
    loss.backward()
    # What the hooks of the last layer cost comes after its deadline.
    assert clock.now - started == pytest.approx(0.4 + 2 * 0.05)


def test_gradients_differ_by_rank_step_and_layer() -> None:
    first, second = (EmulatedModel(MODEL, Compute(0.0), seed=rank) for rank in range(2))
    grads = []
    for _ in range(2):
        for model in (first, second):
            model.zero_grad()
            model(torch.zeros(1)).sum().backward()
            grads.append([param.grad.clone() for param in model.parameters() if param.grad is not None])
    flat = [torch.cat([grad.flatten() for grad in each]) for each in grads]
    assert all(len(each) == 12 + 4 + 5 + 6 for each in flat)
    for number, one in enumerate(flat):
        assert bool(one.isfinite().all()) and float(one.std()) > 0
        assert all(not torch.equal(one, other) for other in flat[:number])
    assert not torch.equal(flat[0][:5], flat[0][16:21])


def test_gradients_are_taken_over_without_a_copy() -> None:
    model = EmulatedModel(MODEL, Compute(0.0))
    model(torch.zeros(1)).sum().backward()
    pool = model.layers[0].pool_N.untyped_storage().data_ptr()  # pyright: ignore
    assert all(p.grad is not None and p.grad.untyped_storage().data_ptr() == pool for p in model.parameters())


def test_a_slowed_host_takes_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "speed"
    file.write_text("0.25")
    monkeypatch.setenv(SPEED_FILE, str(file))
    model = EmulatedModel(MODEL, Compute(0.1, forward_share=1.0))
    started = time.perf_counter()
    model(torch.zeros(1))
    assert time.perf_counter() - started >= 0.4


@pytest.mark.parametrize("content", ["", "fast", "0", "-1"])
def test_a_speed_that_is_none_counts_as_one(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.bench.compute import read_speed

    (tmp_path / "speed").write_text(content)
    monkeypatch.setenv(SPEED_FILE, str(tmp_path / "speed"))
    assert read_speed() == 1.0


@pytest.mark.parametrize(("options", "named"), [({"step_s": -1}, "step_s"), ({"forward_share": 2}, "forward_share")])
def test_wrong_times_are_refused(options: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Compute(**{"step_s": 0.1, **options})

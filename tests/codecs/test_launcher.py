"""A kernel is looked up once for each kind of launch, and launched with the same arguments from then on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bagua.codecs import launcher
from bagua.codecs.launcher import Launcher

GRID, DEVICE = (3, 2, 1), torch.device("cuda", 0)


class Compiled:
    packed_metadata = ()

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.launches.append((grid, *args))


class Kernel:
    """Stands for a function of `triton.jit`."""

    def __init__(self, makes: type | None = Compiled) -> None:
        self.made: list[Any] = []
        self.options: list[dict[str, Any]] = []
        self._makes = makes

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*args: Any, **options: Any) -> Any:
            self.options.append(options)
            self.made.append(None if self._makes is None else self._makes())
            return self.made[-1]

        return launch


@pytest.fixture(autouse=True)
def device_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def launch(to: Launcher, x: Tensor, weight: float = 0.5, n: int = 100, mean: bool = False, device: Any = DEVICE) -> Any:
    args = (x, x.stride(0), weight, n, mean)
    to(device, GRID, (x,), args)
    return args


def test_the_second_launch_goes_to_what_the_first_one_compiled() -> None:
    kernel, x = Kernel(), torch.zeros(4, 8)
    to = Launcher(kernel)
    launch(to, x)
    (compiled,) = kernel.made
    assert kernel.options == [{"enable_fp_fusion": False, "num_warps": 4}] and not compiled.launches
    args = launch(to, x, weight=0.25)  # a float is no part of what was compiled
    assert len(kernel.made) == 1
    assert compiled.launches == [(GRID, *args)]


@pytest.mark.parametrize("change", [{"n": 96}, {"n": 1}, {"mean": True}, {"device": torch.device("cuda", 1)}])
def test_another_kind_of_launch_is_compiled_anew(change: dict[str, Any]) -> None:
    kernel, x = Kernel(), torch.zeros(4, 8)
    to = Launcher(kernel)
    launch(to, x)
    launch(to, x, **change)
    assert len(kernel.made) == 2 and not any(each.launches for each in kernel.made)


def test_another_alignment_and_another_stride_are_compiled_anew() -> None:
    kernel, flat = Kernel(), torch.zeros(100)
    to = Launcher(kernel)
    for x in (flat[:64].view(8, 8), flat[1:65].view(8, 8), flat[:90].view(9, 10)[:8, :8]):
        launch(to, x)
    assert len(kernel.made) == 3


def test_a_launch_from_another_current_device_goes_through_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = Kernel(), torch.zeros(4, 8)
    to = Launcher(kernel)
    launch(to, x)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(to, x)
    assert len(kernel.made) == 2


def test_the_interpreter_compiles_nothing_that_could_be_kept() -> None:
    kernel, x = Kernel(None), torch.zeros(4, 8)
    to = Launcher(kernel)
    for _ in range(2):
        launch(to, x, device=torch.device("cpu"))
    assert len(kernel.made) == 2


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "_MOST", 3)
    kernel, x = Kernel(), torch.zeros(4, 8)
    to = Launcher(kernel)
    for n in range(2, 12):
        launch(to, x, n=n)
    assert len(to._compiled) <= 3

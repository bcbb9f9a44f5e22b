"""Data of the suite: all of it is drawn from a seed, on any machine, without a download."""

from __future__ import annotations

import math
import sysconfig
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.convergence.suite.models import CLASSES, FEATURES, SIDE

__all__ = ["Images", "Noisy", "SourceText", "load_text", "student_t"]

_TEXT_BYTES = 600_000
_LEAST_FILE = 2_000  # bytes: below lie files that hold little but imports
_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Images:
    """Classes of grey pictures: a smooth random template each, deformed, partly covered and noisy in each sample.

    Args:
        seed: draws the templates; the same for training and held-out samples.
    """

    noise = 0.9  # standard deviation, that of the templates being 1

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        coarse = torch.randn(CLASSES, 1, 4, 4, generator=generator)
        smooth = F.interpolate(coarse, SIDE, mode="bicubic", align_corners=False)
        self._templates = (smooth - smooth.mean((2, 3), keepdim=True)) / smooth.std((2, 3), keepdim=True)

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return images [count, 1, SIDE, SIDE] and classes [count]."""

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(count, generator=generator)

        classes = torch.randint(0, CLASSES, (count,), generator=generator)
        angle, scale, shear = uniform(-0.6, 0.6), uniform(0.75, 1.3), uniform(-0.25, 0.25)
        cos, sin = angle.cos() * scale, angle.sin() * scale
        rows = [torch.stack([cos, shear - sin, uniform(-0.35, 0.35)], 1)]
        rows += [torch.stack([sin, cos, uniform(-0.35, 0.35)], 1)]
        grid = F.affine_grid(torch.stack(rows, 1), [count, 1, SIDE, SIDE], align_corners=False)
        deformed = F.grid_sample(self._templates[classes], grid, padding_mode="zeros", align_corners=False)
        image = deformed * uniform(0.6, 1.4)[:, None, None, None]
        image = image.masked_fill(self._covered(count, generator), 0.0)
        return image + self.noise * torch.randn(image.shape, generator=generator), classes

    @staticmethod
    def _covered(count: int, generator: torch.Generator) -> Tensor:
        """A square of a third of the side in each image: [count, 1, SIDE, SIDE]."""
        side = SIDE // 3
        corner = torch.randint(0, SIDE - side + 1, (2, count, 1), generator=generator)
        inside = (torch.arange(SIDE) >= corner) & (torch.arange(SIDE) < corner + side)
        return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def student_t(shape: tuple[int, ...], freedom: int, generator: torch.Generator) -> Tensor:
    """Return values of Student's t distribution with `freedom` degrees of freedom."""
    normal = torch.randn(*shape, generator=generator)
    squares = torch.randn(*shape, freedom, generator=generator).square().sum(-1)
    return normal / (squares / freedom).sqrt()


class Noisy:
    """A smooth random function of heavy-tailed inputs, with heavy-tailed noise: Student's t, 3 degrees of freedom.

    Args:
        seed: draws the function; the same for training and held-out samples.
    """

    freedom = 3
    noise = 0.2  # times Student's t; the function's own standard deviation is 1

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._inner = torch.randn(FEATURES, 16, generator=generator) / math.sqrt(FEATURES)
        self._outer = torch.randn(16, 1, generator=generator)
        self._shift, self._scale = 0.0, 1.0
        values = self.clean(student_t((4096, FEATURES), self.freedom, generator))
        self._shift, self._scale = values.mean().item(), values.std().item()

    def clean(self, inputs: Tensor) -> Tensor:
        """Return the function without noise, [B, 1], of inputs [B, FEATURES]."""
        return ((inputs @ self._inner).tanh() @ self._outer - self._shift) / self._scale

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return inputs [count, FEATURES] and targets [count, 2]: with noise and without."""
        inputs = student_t((count, FEATURES), self.freedom, generator)
        clean = self.clean(inputs)
        noisy = clean + self.noise * student_t((count, 1), self.freedom, generator)
        return inputs, torch.cat([noisy, clean], 1)


class SourceText(NamedTuple):
    """Bytes to train on and bytes held out, as int64; how many files they come from, and a digest of both."""

    train: Tensor
    test: Tensor
    files: int
    digest: str


@lru_cache(maxsize=1)
def _files() -> list[Path]:
    """Python files of the standard library; the folders of other packages, which are large, are not entered."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = list(root.glob("*.py"))
    for folder in root.iterdir():
        if folder.is_dir() and folder.name not in _SKIPPED:
            found += [path for path in folder.rglob("*.py") if not _SKIPPED & set(path.relative_to(root).parts)]
    return sorted(path for path in found if path.stat().st_size >= _LEAST_FILE)


@lru_cache(maxsize=2)
def load_text(seed: int) -> SourceText:
    """Return source files of the standard library that the seed draws; every fifth of them is held out."""
    found = _files()
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(seed)).tolist()
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    taken = total = 0
    for place in order:
        part = found[place].read_bytes()[: _TEXT_BYTES // 8]  # no file is most of the text
        parts[taken % 5 == 4].append(part)
        taken, total = taken + 1, total + len(part)
        if total >= _TEXT_BYTES:
            break
    train, test = (b"".join(parts[held_out]) for held_out in (False, True))
    digest = sha256(train + b"\0" + test).hexdigest()[:16]
    tensors = [torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (train, test)]
    return SourceText(tensors[0], tensors[1], taken, digest)

"""Images in folders, as ImageNet comes: DIRECTORY/train/CLASS/*.jpeg and DIRECTORY/val/CLASS/*.jpeg. Needs Pillow."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["ImageFolder", "center_crop", "random_crop"]

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm"}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet's pixels, as torchvision's models expect
AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)  # of random crops; arXiv:1409.4842, section 6
MARGIN = 256 / 224  # side of a validation image before its middle is cut out


class ImageFolder(Dataset[tuple[Tensor, int]]):
    """Images [3, S, S], normalised, and the number of their folder in the order of names.

    Args:
        directory: with a folder for each class.
        crop: makes a square of an image.

    Raises:
        FileNotFoundError: there are no such folders, or no images in them.
    """

    def __init__(self, directory: Path, crop: Callable[[Image.Image], Image.Image]) -> None:
        self.crop = crop
        self.classes = sorted(path.name for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        self.samples = [
            (path, number)
            for number, name in enumerate(self.classes)
            for path in sorted((directory / name).rglob("*"))
            if path.suffix.lower() in ENDINGS
        ]
        if not self.samples:
            raise FileNotFoundError(f"{directory}: expected a folder of images for each class")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        with Image.open(path) as file:
            image = self.crop(file.convert("RGB"))
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.view(image.height, image.width, 3).permute(2, 0, 1).float() / 255
        return (pixels - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None], label


def random_crop(side: int) -> Callable[[Image.Image], Image.Image]:
    """A part of random area and aspect ratio, or its mirror image, of `side` pixels; from torch's generator."""

    def crop(image: Image.Image) -> Image.Image:
        width, height = image.size
        low, high = (math.log(ratio) for ratio in RATIO)
        for _ in range(10):
            area = width * height * _uniform(*AREA)
            ratio = math.exp(_uniform(low, high))
            w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < w <= width and 0 < h <= height:
                break
        else:
            w = h = min(width, height)
        left, top = _below(width - w + 1), _below(height - h + 1)
        part = image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + w, top + h))
        return part.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if _below(2) else part

    return crop


def center_crop(side: int) -> Callable[[Image.Image], Image.Image]:
    """The middle, of `side` pixels, of the image whose shorter side is 8/7 of that."""

    def crop(image: Image.Image) -> Image.Image:
        edge = min(image.size) / MARGIN
        left, top = (image.width - edge) / 2, (image.height - edge) / 2
        return image.resize((side, side), Image.Resampling.BILINEAR, box=(left, top, left + edge, top + edge))

    return crop


def _uniform(low: float, high: float) -> float:
    return low + (high - low) * torch.rand(()).item()


def _below(count: int) -> int:
    return int(torch.randint(count, ()).item())

"""The models of the suite. Each function makes one; `bagua.plan.load_model` takes them as `FILE.py:FUNCTION`."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.convergence.byte_gpt import TASKS, Block, ByteGPT

__all__ = ["CLASSES", "FEATURES", "SIDE", "convolutional", "gpt", "perceptron", "vision_transformer"]

SIDE, CLASSES = 12, 10  # of the images
FEATURES = 24  # of the regression


class _ConvNet(nn.Module):
    """Two convolutions, each with a max-pool, and a hidden layer; 23,946 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.hidden = nn.Linear(32 * (SIDE // 4) ** 2, 64)
        self.out = nn.Linear(64, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, CLASSES] of images [B, 1, SIDE, SIDE]."""
        x = F.max_pool2d(F.relu(self.conv1(images)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.out(F.relu(self.hidden(x.flatten(1))))


class _VisionTransformer(nn.Module):
    """Two blocks over patches of 4 x 4 pixels, and the mean over patches; 26,634 parameters."""

    def __init__(self, width: int = 32, patch: int = 4) -> None:
        super().__init__()
        patches = (SIDE // patch) ** 2
        self.cut = nn.Unfold(patch, stride=patch)
        self.embed = nn.Linear(patch * patch, width)
        self.position = nn.Embedding(patches, width)
        self.blocks = nn.Sequential(*(Block(width, causal=False) for _ in range(2)))
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, CLASSES)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, CLASSES] of images [B, 1, SIDE, SIDE]."""
        tokens = self.embed(self.cut(images).transpose(1, 2)) + self.position.weight
        return self.out(self.norm(self.blocks(tokens)).mean(1))


def convolutional() -> nn.Module:
    """Return the convolutional net."""
    return _ConvNet()


def vision_transformer() -> nn.Module:
    """Return the vision transformer."""
    return _VisionTransformer()


def gpt() -> nn.Module:
    """Return the GPT on bytes; 83,008 parameters."""
    return ByteGPT(TASKS["small"])


def perceptron() -> nn.Module:
    """Return the net of the regression, [B, FEATURES] to [B, 1]; 19,841 parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 1)
    )  # fmt: skip

"""Residual networks for images."""

from __future__ import annotations

from torch import Tensor, nn

from bagua.sys_perf.models.width import scaled

__all__ = ["DEPTHS", "ResNet"]

# Layers in the name -> blocks of each stage, and whether a block has the 1 x 1 layers around the 3 x 3 one.
DEPTHS: dict[int, tuple[tuple[int, ...], bool]] = {
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
    101: ((3, 4, 23, 3), True),
    152: ((3, 8, 36, 3), True),
}
EXPANSION = 4


def _conv(before: int, after: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the side (at stride 1), and its batch norm."""
    return [
        nn.Conv2d(before, after, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(after),
    ]


class Block(nn.Module):
    """Adds to its input what two 3 x 3 convolutions make of it, or 1 x 1, 3 x 3 and 1 x 1.

    The stride is in the (first) 3 x 3 convolution.
    """

    def __init__(self, before: int, inner: int, after: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        relu = nn.ReLU(inplace=True)
        if bottleneck:
            layers = [*_conv(before, inner, 1), relu, *_conv(inner, inner, 3, stride), relu, *_conv(inner, after, 1)]
        else:
            layers = [*_conv(before, inner, 3, stride), relu, *_conv(inner, after, 3)]
        self.layers = nn.Sequential(*layers)
        plain = before == after and stride == 1
        self.shortcut = nn.Identity() if plain else nn.Sequential(*_conv(before, after, 1, stride))
        self.relu = relu

    def forward(self, x: Tensor) -> Tensor:
        """[B, before, H, W] to [B, after, H / stride, W / stride]."""
        return self.relu(self.layers(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet of 18, 34, 50, 101 or 152 layers; 25,557,032 parameters with 50, scale 1 and 1000 classes.

    Args:
        depth: number of layers.
        num_classes: of the last layer.
        scale: factor of all widths but that of the last layer.

    Raises:
        ValueError: there is no ResNet of that depth.

    Source: arXiv:1512.03385, table 1.
    Differs: the stride of a bottleneck is in its 3 x 3 convolution, as in torchvision's.
    """

    def __init__(self, depth: int = 50, num_classes: int = 1000, scale: float = 1.0) -> None:
        super().__init__()
        if depth not in DEPTHS:
            raise ValueError(f"depth: expected one of {', '.join(map(str, DEPTHS))}, got {depth!r}")
        blocks, bottleneck = DEPTHS[depth]
        before = scaled(64, scale)
        layers: list[nn.Module] = [*_conv(3, before, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
        for stage, count in enumerate(blocks):
            inner = scaled(64 * 2**stage, scale)
            after = scaled(64 * 2**stage * EXPANSION, scale) if bottleneck else inner
            for number in range(count):
                stride = 2 if stage > 0 and number == 0 else 1
                layers.append(Block(before, inner, after, stride, bottleneck))
                before = after
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(before, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, 3, H, W]."""
        return self.classifier(self.pool(self.features(images)).flatten(1))

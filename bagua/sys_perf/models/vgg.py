"""VGG-16: thirteen convolutions and three linear layers."""

from __future__ import annotations

from torch import Tensor, nn

from bagua.sys_perf.models.width import scaled

__all__ = ["VGG16"]

STAGES = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))  # channels, convolutions
POOLED = 7  # side of the features that the linear layers see, whatever the image's


class VGG16(nn.Module):
    """Configuration D without batch norm; 138,357,544 parameters at scale 1.

    Args:
        num_classes: of the last layer.
        scale: factor of all widths but that of the last layer.
        dropout: probability, after each of the two hidden linear layers.

    Source: arXiv:1409.1556, table 1.
    """

    def __init__(self, num_classes: int = 1000, scale: float = 1.0, dropout: float = 0.5) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for channels, depth in STAGES:
            for _ in range(depth):
                after = scaled(channels, scale)
                layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(inplace=True)]
                before = after
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(POOLED)
        hidden = scaled(4096, scale)
        self.classifier = nn.Sequential(
            nn.Linear(before * POOLED * POOLED, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
            nn.Linear(hidden, num_classes),
        )  # fmt: skip
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes] of images [B, 3, H, W]; H and W are 32 at least."""
        return self.classifier(self.pool(self.features(images)).flatten(1))

"""Sizes of the models, against published counts."""

from __future__ import annotations

import pytest

from bagua.bench import models


@pytest.mark.parametrize(
    ("name", "elements"),
    [
        ("vgg16", 138_357_544),  # arXiv:1409.1556; torchvision's vgg16
        ("resnet50", 25_557_032),  # torchvision's resnet50
        ("bert_large", 335_141_888),  # bert-large-uncased without heads
        ("layers25m", 25_000_000),
    ],
)
def test_number_of_elements(name: str, elements: int) -> None:
    assert models.get(name).num_elements == elements
    tenth = models.get(f"{name}/10")
    assert tenth.num_elements == pytest.approx(elements / 10, rel=0.03)
    assert [len(layer.shapes) for layer in tenth.layers] == [len(layer.shapes) for layer in models.get(name).layers]


def test_most_of_vggs_work_is_in_convolutions_and_most_of_its_elements_are_not() -> None:
    layers = models.get("vgg16").layers
    convolutions = [layer for layer in layers if layer.name.startswith("conv")]
    assert sum(layer.work for layer in convolutions) > 0.98 * sum(layer.work for layer in layers)
    assert sum(layer.num_elements for layer in convolutions) == 14_714_688
    # 15.5 G multiply-adds for one image
    assert sum(layer.work for layer in layers) == pytest.approx(15.47e9, rel=0.01)


def test_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'vgg17' is unknown.*resnet50/10"):
        models.get("vgg17")

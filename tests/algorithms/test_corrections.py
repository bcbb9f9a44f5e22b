"""The options that correct Adam's moments, of every algorithm that has both."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bagua.algorithms import AsyncModelAverage, Decentralized, DiLoCo, LocalSGD


@pytest.mark.parametrize("algorithm", [AsyncModelAverage, Decentralized, DiLoCo, LocalSGD])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean_moments": "yes"}, "mean_moments: expected True, False or None, got 'yes'"),
        ({"scale_second_moment": 1}, "scale_second_moment: expected True, False or None, got 1"),
        ({"mean_moments": True, "scale_second_moment": True}, "mean_moments and scale_second_moment contradict"),
    ],
)
def test_wrong_options(algorithm: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        algorithm(**options)

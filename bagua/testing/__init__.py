"""Contracts of algorithms and codecs: what the library relies on, as checks that run in one process without pytest.

bagua.testing.check_algorithm(MyAlgorithm(alpha=0.3))
bagua.testing.check_codec(MyCodec())
"""

from __future__ import annotations

from bagua.testing.algorithm_contract import ALGORITHM_CHECKS, check_algorithm
from bagua.testing.codec_contract import CODEC_CHECKS, check_codec

__all__ = ["ALGORITHM_CHECKS", "CODEC_CHECKS", "check_algorithm", "check_codec"]

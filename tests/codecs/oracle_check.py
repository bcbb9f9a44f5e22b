"""Codecs beside independent oracles: the same bytes and numbers, bit for bit, on every backend."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from hypothesis import strategies as st

from bagua import codecs
from bagua.codecs import Codec

BACKENDS = codecs.available_backends()
MAX = float(np.finfo(np.float32).max)

Oracle = Callable[[np.ndarray], tuple[bytes, np.ndarray]]


def check(codec: Codec, oracle: Oracle, x: np.ndarray) -> None:
    """Wire, decoded rows and their weighted sum on every backend are what the oracle says of each row, bit for bit."""
    n = x.shape[1]
    with np.errstate(all="ignore"):
        expected = [oracle(row) for row in x]
        total = np.zeros(n, np.float32)
        for _, decoded in expected:
            total += decoded
        total *= np.float32(0.3)
    for backend in BACKENDS:
        with codecs.use_backend(backend):
            wire = codec.encode(torch.from_numpy(x))
            y = codec.decode(wire, n).numpy()
            mean = codec.decode_mean(wire, n, torch.empty(n), 0.3).numpy()
        for r, (bytes_, decoded) in enumerate(expected):
            assert wire[r].numpy().tobytes() == bytes_, backend
            np.testing.assert_array_equal(y[r], decoded, err_msg=backend)
        np.testing.assert_array_equal(mean, total, err_msg=backend)


def numbers() -> st.SearchStrategy[float]:
    """All floats, with those that hurt more often."""
    special = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 2.0**-126, 1e-37, 1e-30, MAX, -MAX])
    odd = st.sampled_from([float("nan"), float("inf"), -float("inf")])
    return st.one_of(st.floats(width=32), st.floats(-1, 1, width=32), special, special, odd)

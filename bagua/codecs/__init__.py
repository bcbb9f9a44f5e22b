"""Codecs: encode flat rows of floating-point numbers as bytes, and decode them.

`get("minmax_uint8", block=512).encode(x_RN)` gives one uint8 tensor [R, W], one row for each peer.
"""

from bagua.codecs.backends import available_backends, backend, use_backend
from bagua.codecs.base import Codec
from bagua.codecs.eden import Eden
from bagua.codecs.half import Bf16, Fp16
from bagua.codecs.identity import Identity
from bagua.codecs.int4 import Int4
from bagua.codecs.minmax_uint8 import MinMaxUInt8
from bagua.codecs.packed_top_k import PackedTopK
from bagua.codecs.registry import available, get, register
from bagua.codecs.sign import Sign
from bagua.codecs.top_k import TopK

__all__ = [
    "Bf16",
    "Codec",
    "Eden",
    "Fp16",
    "Identity",
    "Int4",
    "MinMaxUInt8",
    "PackedTopK",
    "Sign",
    "TopK",
    "available",
    "available_backends",
    "backend",
    "get",
    "register",
    "use_backend",
]

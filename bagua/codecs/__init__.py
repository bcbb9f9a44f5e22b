"""Codecs: flat rows of floating-point numbers to bytes and back.

``get("minmax_uint8", block=512).encode(x_RN)`` gives one uint8 tensor [R, W], one row for each peer.
"""

from .backends import available_backends, backend, use_backend
from .base import Codec
from .half import Bf16, Fp16
from .identity import Identity
from .int4 import Int4
from .minmax_uint8 import MinMaxUInt8
from .registry import available, get, register
from .sign import Sign
from .top_k import TopK

__all__ = [
    "Bf16",
    "Codec",
    "Fp16",
    "Identity",
    "Int4",
    "MinMaxUInt8",
    "Sign",
    "TopK",
    "available",
    "available_backends",
    "backend",
    "get",
    "register",
    "use_backend",
]

"""Which library carries the tensors of a backend of `torch.distributed`, whatever torch calls it."""

from __future__ import annotations

from typing import Any

__all__ = ["backend_kind"]


def backend_kind(backend: Any) -> str:
    """Return "gloo" or "nccl", or the backend's own name if it is neither.

    From torch 2.15 on the name "nccl" stands for another class, `ProcessGroupNCCL2`, and there are "nccl-legacy" and
    "nccl-lazy"; all of them call NCCL.

    Args:
        backend: what `ProcessGroup._get_backend` returns for a device.
    """
    name = str(backend.name()).lower()
    return "nccl" if name.startswith("nccl") else name

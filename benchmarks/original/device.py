"""What a script for GPUs needs to run on CPUs: a short list of textual changes, made in memory."""

from __future__ import annotations

import re

__all__ = ["CHANGES", "to_cpu"]

_ARGUMENTS = r"\((?:[^()]|\([^()]*\))*\)"  # with one level of parentheses inside
# What is found -> what stands there instead. Everything else of a script stays as it is.
CHANGES = (
    (rf"torch\.cuda\.set_device{_ARGUMENTS}", "None"),
    (r"torch\.cuda\.is_available\(\)", "True"),
    (r"torch\.cuda\.amp\.GradScaler\(", 'torch.amp.GradScaler("cpu", '),
    (r"torch\.cuda\.amp\.autocast\(", 'torch.autocast("cpu", '),
    (rf"(?<!torch)\.cuda{_ARGUMENTS}", ""),
    (rf'torch\.device\("cuda",{_ARGUMENTS[2:]}', 'torch.device("cpu")'),
    (rf'"cuda:\{{\}}"\.format{_ARGUMENTS}', '"cpu"'),
    (r"\.to\(bagua\.get_local_rank\(\)\)", '.to("cpu")'),
    (r"\(device_ids=\[[^\]]*\]\)", "()"),  # of torch.distributed.barrier: gloo takes none
)


def to_cpu(source: str) -> tuple[str, int]:
    """Replace what needs a GPU.

    Args:
        source: of a Python script.

    Returns:
        The changed script, with as many lines as before, and the number of lines that differ.
    """
    changed = source
    for found, instead in CHANGES:
        changed = re.sub(found, instead, changed)
    before, after = source.splitlines(), changed.splitlines()
    if len(before) != len(after):
        raise ValueError(f"a call over several lines was changed: {len(before)} lines before, {len(after)} after")
    return changed, sum(a != b for a, b in zip(before, after, strict=True))

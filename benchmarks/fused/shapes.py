"""Parameter shapes to step: many small ones, and those of BERT-base."""

from __future__ import annotations

__all__ = ["MODELS", "bert_base", "many_small"]

Shapes = list[tuple[int, ...]]

# Matrices, biases, norms and small convolutions, 146 elements on average.
_CYCLE: Shapes = [(16, 16), (16,), (8, 8, 3, 3), (8,), (32, 16), (32,), (16,), (16,), (10, 2), (10,)]


def many_small(count: int) -> Shapes:
    """`count` parameters of 8 to 576 elements."""
    return [_CYCLE[at % len(_CYCLE)] for at in range(count)]


def bert_base() -> Shapes:
    """The 199 parameters of BERT-base, uncased, with its pooler: 109.5 million elements. Source: arXiv 1810.04805."""
    hidden, inner = 768, 3072
    layer: Shapes = []
    for _ in range(4):  # query, key, value, output
        layer += [(hidden, hidden), (hidden,)]
    layer += [(hidden,), (hidden,), (inner, hidden), (inner,), (hidden, inner), (hidden,), (hidden,), (hidden,)]
    embeddings: Shapes = [(30522, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    return embeddings + layer * 12 + [(hidden, hidden), (hidden,)]


MODELS: dict[str, Shapes] = {
    "1,000 small": many_small(1000),
    "10,000 small": many_small(10_000),
    "BERT-base": bert_base(),
}

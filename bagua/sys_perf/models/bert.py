"""BERT: an encoder of text and its pre-training heads.

Legend: B sequences, T tokens, H width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bagua.sys_perf.models.width import scaled

__all__ = ["Bert", "BertConfig", "BertForPreTraining"]

HEAD = 64  # width of an attention head in all published sizes


@dataclass(frozen=True)
class BertConfig:
    """Sizes of a BERT; the defaults are BERT-Large, uncased.

    Attributes:
        vocab_size: word pieces.
        hidden_size: width H, a multiple of `num_heads`.
        num_layers: of the encoder.
        num_heads: of each layer's attention.
        intermediate_size: width of the feed-forward layer.
        max_positions: longest sequence, tokens.
        num_types: of segments.
        dropout: probability, of attention weights too.

    Source: arXiv:1810.04805, section 3.
    """

    vocab_size: int = 30522
    hidden_size: int = 1024
    num_layers: int = 24
    num_heads: int = 16
    intermediate_size: int = 4096
    max_positions: int = 512
    num_types: int = 2
    dropout: float = 0.1

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "intermediate_size", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected a positive number, got {getattr(self, name)!r}")
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size: {self.hidden_size} is not a multiple of num_heads, {self.num_heads}")

    @classmethod
    def large(cls, scale: float = 1.0) -> BertConfig:
        """BERT-Large, or one whose widths are `scale` times those, rounded to whole attention heads."""
        return cls._sized(16, 24, scale)

    @classmethod
    def base(cls, scale: float = 1.0) -> BertConfig:
        """BERT-Base, as `large`."""
        return cls._sized(12, 12, scale)

    @classmethod
    def _sized(cls, heads: int, layers: int, scale: float) -> BertConfig:
        heads = scaled(heads, scale)
        width = heads * HEAD
        return cls(hidden_size=width, num_layers=layers, num_heads=heads, intermediate_size=4 * width)


class Layer(nn.Module):
    """Self-attention over all tokens and a feed-forward net, each added to its input and normalised after."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.num_heads, self.dropout = config.num_heads, config.dropout
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.mixed, self.attention_norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.inner, self.outer = nn.Linear(width, config.intermediate_size), nn.Linear(config.intermediate_size, width)
        self.output_norm = nn.LayerNorm(width, eps=1e-12)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """[B, T, H] to the same; `mask` [B, 1, 1, T] is true where a token may be attended to."""
        q, k, v = (
            linear(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        drop = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=drop)
        mixed = self.mixed(mixed.transpose(1, 2).flatten(2))
        x = self.attention_norm(x + F.dropout(mixed, self.dropout, self.training))
        y = self.outer(F.gelu(self.inner(x)))
        return self.output_norm(x + F.dropout(y, self.dropout, self.training))


class Bert(nn.Module):
    """The encoder; 335,141,888 parameters as BERT-Large with its pooler.

    Args:
        config: its sizes.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.words = nn.Embedding(config.vocab_size, width, padding_idx=0)
        self.positions, self.types = nn.Embedding(config.max_positions, width), nn.Embedding(config.num_types, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.pooler = nn.Linear(width, width)
        self.apply(_initialise)

    def forward(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Return a vector for each token, [B, T, H].

        Args:
            tokens: word pieces [B, T].
            types: segment of each token [B, T]; None: all 0.
            mask: true for tokens, false for padding [B, T]; None: no padding.
        """
        length = tokens.shape[1]
        if length > self.config.max_positions:
            raise ValueError(f"tokens: {length} in a sequence, max_positions is {self.config.max_positions}")
        x = self.words(tokens) + self.positions.weight[:length]
        x = x + (self.types.weight[0] if types is None else self.types(types))
        x = F.dropout(self.norm(x), self.config.dropout, self.training)
        seen = None if mask is None else mask[:, None, None, :]
        for layer in self.layers:
            x = layer(x, seen)
        return x


class BertForPreTraining(nn.Module):
    """The encoder with its two pre-training heads; 336,226,108 parameters as BERT-Large.

    The word table serves as the matrix of the masked-word head.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.bert = Bert(config)
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width, eps=1e-12)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.follows = nn.Linear(width, 2)
        for head in (self.transform, self.follows):
            _initialise(head)

    def forward(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return logits of each word [B, T, vocab_size], and of "the second segment follows the first" [B, 2]."""
        x = self.bert(tokens, types, mask)
        pooled = torch.tanh(self.bert.pooler(x[:, 0]))
        words = self.norm(F.gelu(self.transform(x)))
        return F.linear(words, self.bert.words.weight, self.bias), self.follows(pooled)


def _initialise(module: nn.Module) -> None:
    """Normal weights of deviation 0.02, zero biases, a zero vector for padding."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    if isinstance(module, nn.Embedding) and module.padding_idx is not None:
        with torch.no_grad():
            module.weight[module.padding_idx].zero_()

"""Random models and data for Hugging Face's loops, small enough for seconds; nothing is downloaded."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

VOCABULARY = 48
CLASSES = 3
LENGTH = 8


def tiny_bert(seed: int = 0) -> Any:
    """A classifier without dropout, so that ranks and runs compute alike."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def tiny_llama(seed: int = 0) -> Any:
    """A causal language model whose embeddings are tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=32,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


class Sentences(Dataset[dict[str, Tensor]]):
    """Random token sequences, whose class is that of their most frequent remainder."""

    def __init__(self, count: int = 64, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCABULARY, (count, LENGTH), generator=generator)
        remainders = nn.functional.one_hot(self.tokens % CLASSES, CLASSES)
        self.labels = remainders.sum(1).argmax(1)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "input_ids": self.tokens[index],
            "attention_mask": torch.ones(LENGTH, dtype=torch.long),
            "labels": self.labels[index],
        }

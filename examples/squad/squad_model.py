"""The model and its tokenizer, both of transformers: a small BERT from nothing, or one that was saved or published."""

# pyright: reportMissingImports=false
from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from squad_file import Question
from tokenizers import BertWordPieceTokenizer
from transformers import AutoConfig, BertConfig, BertForQuestionAnswering, BertTokenizerFast

__all__ = ["learn_pieces", "load_model"]

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def load_model(args: Namespace, questions: Sequence[Question], last: str | None) -> tuple[Any, Any]:
    """Return model and tokenizer as the command line wants them.

    Args:
        args: of the command line.
        questions: to learn word pieces from, for a model that starts from nothing.
        last: the checkpoint that the training goes on from, which has the word pieces learned before.

    Raises:
        SystemExit: the model is not a BERT.
    """
    path, options = args.model_name_or_path, {"cache_dir": args.cache_dir}
    if path is None:
        tokenizer = _make_tokenizer(args, questions, last)
        return BertForQuestionAnswering(_small(args, len(tokenizer))), tokenizer
    config = AutoConfig.from_pretrained(args.config_name or path, **options)
    if config.model_type != args.model_type:
        raise SystemExit(f"--model_name_or_path {path}: its type is {config.model_type!r}, not {args.model_type!r}")
    model = BertForQuestionAnswering.from_pretrained(path, config=config, **options)
    lower = {"do_lower_case": True} if args.do_lower_case else {}
    if args.tokenizer_name is not None and Path(args.tokenizer_name).is_file():
        return model, BertTokenizerFast(vocab=args.tokenizer_name, **lower)
    return model, BertTokenizerFast.from_pretrained(args.tokenizer_name or path, **options, **lower)


def learn_pieces(questions: Sequence[Question], size: int) -> dict[str, int]:
    """Return word pieces of the questions and their paragraphs, with their numbers; the same each time.

    Args:
        questions: to learn from.
        size: most pieces; single letters are kept even if they are more.
    """
    texts = [question.text for question in questions] + list({question.context: None for question in questions})
    learner = BertWordPieceTokenizer(lowercase=True)
    letters = sorted({letter for text in texts for letter in learner.normalize(text)} - set(" "))
    # The learner numbers letters within a word as it meets them, in an order that changes, unless they are given.
    given = [*SPECIAL, *(f"##{letter}" for letter in letters)]
    learner.train_from_iterator(texts, vocab_size=size, special_tokens=given, show_progress=False)
    return learner.get_vocab()


def _make_tokenizer(args: Namespace, questions: Sequence[Question], last: str | None) -> Any:
    """For a model from nothing."""
    if last is not None:
        return BertTokenizerFast.from_pretrained(last)
    if args.tokenizer_name is None:
        return BertTokenizerFast(vocab=learn_pieces(questions, args.vocab_size))
    if Path(args.tokenizer_name).is_file():
        return BertTokenizerFast(vocab=args.tokenizer_name)
    return BertTokenizerFast.from_pretrained(args.tokenizer_name, cache_dir=args.cache_dir)


def _small(args: Namespace, pieces: int) -> BertConfig:
    return BertConfig(
        vocab_size=pieces,
        hidden_size=args.hidden_size,
        num_hidden_layers=args.num_layers,
        num_attention_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_position_embeddings=args.max_seq_length,
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )

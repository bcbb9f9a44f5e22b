"""The model and its tokenizer: a small BERT of our own, one that was saved before, or one of transformers'."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from squad_file import Question
from squad_windows import Encoder
from torch import Tensor, nn
from wordpiece import WordPiece

from bagua.sys_perf.models import BertConfig, BertForQuestionAnswering

__all__ = ["load_model", "save_model"]

CONFIG, VOCABULARY, WEIGHTS = "bagua_bert.json", "vocab.txt", "model.pt"


class Pretrained(nn.Module):
    """transformers' question-answering model, with a tuple for an output."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor, types: Tensor | None = None, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """As `BertForQuestionAnswering.forward`."""
        out = self.model(input_ids=tokens, token_type_ids=types, attention_mask=mask)
        return out.start_logits, out.end_logits


class PretrainedEncoder:
    """transformers' tokenizer, as `Encoder`."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.pad_id, self.start_id = tokenizer.pad_token_id, tokenizer.cls_token_id
        self.separator_id = tokenizer.sep_token_id

    def encode(self, text: str) -> list[tuple[int, int, int]]:
        """Number and place of each piece."""
        # The limit of what the model takes is met by cutting into windows afterwards.
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [(number, *place) for number, place in zip(out["input_ids"], out["offset_mapping"], strict=True)]


def load_model(args: Namespace, questions: Sequence[Question]) -> tuple[nn.Module, Encoder]:
    """Return model and tokenizer as the command line wants them.

    Args:
        args: of the command line.
        questions: to learn word pieces from, for a model that starts from nothing.

    Raises:
        SystemExit: what is asked for is not there.
    """
    path = args.model_name_or_path
    if path is not None and (Path(path) / CONFIG).is_file():
        return _load_own(Path(path))
    if path is not None:
        return _load_pretrained(args)
    if args.tokenizer_name is not None:
        encoder = WordPiece.read(Path(args.tokenizer_name))
    else:
        texts = [question.text for question in questions] + list({q.context: None for q in questions})
        encoder = WordPiece.learn(texts, args.vocab_size)
    config = BertConfig(
        vocab_size=len(encoder.vocabulary),
        hidden_size=args.hidden_size,
        num_layers=args.num_layers,
        num_heads=args.num_heads,
        intermediate_size=4 * args.hidden_size,
        max_positions=args.max_seq_length,
        dropout=args.dropout,
    )
    return BertForQuestionAnswering(config), encoder


def save_model(directory: Path, model: nn.Module, encoder: Encoder) -> None:
    """Write what `--model_name_or_path` reads."""
    directory.mkdir(parents=True, exist_ok=True)
    if isinstance(model, Pretrained) and isinstance(encoder, PretrainedEncoder):
        model.model.save_pretrained(directory)
        encoder.tokenizer.save_pretrained(directory)
        return
    assert isinstance(model, BertForQuestionAnswering) and isinstance(encoder, WordPiece)
    (directory / CONFIG).write_text(json.dumps(asdict(model.bert.config), indent=1) + "\n")
    encoder.write(directory / VOCABULARY)
    torch.save(model.state_dict(), directory / WEIGHTS)


def _load_own(directory: Path) -> tuple[nn.Module, Encoder]:
    model = BertForQuestionAnswering(BertConfig(**json.loads((directory / CONFIG).read_text())))
    model.load_state_dict(torch.load(directory / WEIGHTS, map_location="cpu", weights_only=True))
    return model, WordPiece.read(directory / VOCABULARY)


def _load_pretrained(args: Namespace) -> tuple[nn.Module, Encoder]:
    path = args.model_name_or_path
    try:
        import transformers  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        raise SystemExit(
            f"--model_name_or_path {path}: not a directory that this script has written ({CONFIG} is missing), and "
            "transformers is not installed"
        ) from None
    options = {"cache_dir": args.cache_dir}
    config = transformers.AutoConfig.from_pretrained(args.config_name or path, **options)
    if config.model_type != args.model_type:
        raise SystemExit(f"--model_name_or_path {path}: its type is {config.model_type!r}, not {args.model_type!r}")
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(path, config=config, **options)
    lower = {"do_lower_case": True} if args.do_lower_case else {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.tokenizer_name or path, **options, **lower)
    if not tokenizer.is_fast:
        raise SystemExit(f"--tokenizer_name {args.tokenizer_name or path}: only fast tokenizers tell where pieces are")
    return Pretrained(model), PretrainedEncoder(tokenizer)

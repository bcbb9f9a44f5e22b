"""Small synthetic data sets in the formats that the examples read: MNIST, a folder of images, SQuAD and a BERT."""

from __future__ import annotations

import importlib.util
import json
import struct
import sys
from pathlib import Path

import torch

__all__ = ["write_all", "write_bert", "write_image_folder", "write_mnist", "write_squad"]

_WORDS = ("alpha beta gamma delta river stone bridge tower green blue north south where is the what").split()  # noqa: SIM905


def write_all(folder: Path) -> None:
    """Write everything below `folder`; the BERT only where transformers is installed."""
    write_mnist(folder)
    write_image_folder(folder / "images")
    write_squad(folder / "train.json", 48)
    write_squad(folder / "dev.json", 8)
    if importlib.util.find_spec("transformers") is not None:
        write_bert(folder / "bert")


def write_mnist(folder: Path, train: int = 256, test: int = 64) -> None:
    """Write digits in the IDX format below `folder/MNIST/raw`; a class is a bright row in noise."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    made = torch.Generator().manual_seed(1)
    for name, count in (("train", train), ("t10k", test)):
        labels = torch.randint(10, (count,), generator=made)
        images = torch.randint(64, (count, 28, 28), generator=made)
        images[torch.arange(count), 2 * labels + 4] = 255
        head = struct.pack(">IIII", 0x803, count, 28, 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(head + images.to(torch.uint8).numpy().tobytes())
        head = struct.pack(">II", 0x801, count)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(head + labels.to(torch.uint8).numpy().tobytes())


def write_image_folder(folder: Path, per_class: int = 8) -> None:
    """Write `train` and `val`, each with two classes of small PNG files."""
    from PIL import Image  # pyright: ignore[reportMissingImports]

    made = torch.Generator().manual_seed(2)
    for part in ("train", "val"):
        for label in range(2):
            (folder / part / f"class{label}").mkdir(parents=True, exist_ok=True)
            for n in range(per_class):
                pixels = torch.randint(128, (64, 64, 3), generator=made) + 100 * label
                Image.fromarray(pixels.to(torch.uint8).numpy()).save(folder / part / f"class{label}" / f"{n}.png")


def write_squad(path: Path, questions: int) -> None:
    """Write questions in the format of SQuAD 1.1 whose answer is a word of a short text."""
    made = torch.Generator().manual_seed(3)
    paragraphs = []
    for n in range(questions):
        words = [_WORDS[i] for i in torch.randint(10, (12,), generator=made)]
        at = int(torch.randint(12, (1,), generator=made))
        context = " ".join(words)
        answer = {"text": words[at], "answer_start": len(" ".join(words[:at])) + (at > 0)}
        question = {"id": str(n), "question": f"where is the {words[at]}", "answers": [answer]}
        paragraphs.append({"context": context, "qas": [question]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "made up", "paragraphs": paragraphs}]}))


def write_bert(folder: Path) -> None:
    """Write a BERT of two narrow layers with random weights and its vocabulary."""
    from transformers import BertConfig, BertForQuestionAnswering  # pyright: ignore[reportMissingImports]

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_WORDS]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    torch.manual_seed(4)
    BertForQuestionAnswering(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")


if __name__ == "__main__":
    write_all(Path(sys.argv[1]))

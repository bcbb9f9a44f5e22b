"""Train a small BERT with Hugging Face's Trainer, and Bagua in place of DistributedDataParallel.

bagua run --nproc-per-node 2 examples/hf_trainer.py --algorithm bytegrad
bagua run --nproc-per-node 2 examples/hf_trainer.py --algorithm local_sgd --checkpoints out/hf      run again: goes on

Model and data are made here: nothing is downloaded. A sentence belongs to the class whose words it has most of.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from digits import count, make_options
from torch import Tensor, nn
from torch.utils.data import Dataset

import bagua

CLASSES, WORDS, LENGTH = 3, 60, 12


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words; the class is that of most of them.

    Args:
        count: sentences.
        seed: of their words.
    """

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.words = torch.randint(0, WORDS, (count, LENGTH), generator=generator)
        self.classes = nn.functional.one_hot(self.words % CLASSES, CLASSES).sum(1).argmax(1)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.words[index], "labels": self.classes[index]}


def make_model(width: int = 32) -> Any:
    """Return a BERT of two layers for sentences of `LENGTH` words, with random weights."""
    from transformers import BertConfig, BertForSequenceClassification  # pyright: ignore[reportMissingImports]

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=WORDS,
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=LENGTH,
            num_labels=CLASSES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def optimizer_of(algorithm: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Return AdamW, or the optimizer that belongs to `algorithm`."""
    if algorithm == "qadam":
        return bagua.optim.QAdam(model.parameters(), lr=lr, warmup_steps=20)
    if algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(model.parameters(), lr=2 * lr, warmup_steps=20)
    if algorithm == "zero_one_adam":
        return bagua.optim.ZeroOneAdam(model.parameters(), lr=lr, var_freeze_step=20, local_step_scaler=200)
    return torch.optim.AdamW(model.parameters(), lr=lr)


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the fraction of sentences whose class is right."""
    return {"accuracy": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}


def build_parser(description: str = "A small BERT with Hugging Face's Trainer and Bagua.") -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=description)
    names = [row.name for row in bagua.algorithms.available()]
    parser.add_argument("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME",
                        help=f"one of: {', '.join(names)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--steps", type=count, default=200, help="steps of the optimizer (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="sentences per rank and batch (%(default)s)")
    parser.add_argument("--accumulate", type=count, default=2, help="batches per step (%(default)s)")
    parser.add_argument("--lr", type=float, default=0.003, help="learning rate (%(default)s)")
    parser.add_argument("--precision", choices=["no", "bf16"], default="no", help="mixed precision (%(default)s)")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="save there, and go on from there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it went."""
    args = build_parser().parse_args(argv)
    from transformers import TrainingArguments, set_seed  # pyright: ignore[reportMissingImports]

    from bagua.interop.transformers import BaguaTrainer

    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        torch.set_num_threads(1)  # sentences this short are slower with more
    arguments = TrainingArguments(
        output_dir=str(args.checkpoints or "out/hf_trainer"),
        use_cpu=on_cpu,
        max_steps=args.steps,
        per_device_train_batch_size=args.batch_size,
        gradient_accumulation_steps=args.accumulate,
        max_grad_norm=1.0,
        bf16=args.precision == "bf16",
        eval_strategy="steps",
        eval_steps=max(1, args.steps // 4),
        save_strategy="no" if args.checkpoints is None else "steps",
        save_steps=max(1, args.steps // 4),
        save_total_limit=2,
        logging_steps=max(1, args.steps // 8),
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    model = make_model()
    trainer: Any = BaguaTrainer(
        model,
        arguments,
        train_dataset=Sentences(4096, seed=1),
        eval_dataset=Sentences(512, seed=2),
        compute_metrics=accuracy,
        optimizers=(optimizer_of(args.algorithm, model, args.lr), None),
        algorithm=args.algorithm,
        bagua_options=make_options(args.algorithm),
    )
    folders = [] if args.checkpoints is None else list(args.checkpoints.glob("checkpoint-*"))
    done = max((int(path.name.removeprefix("checkpoint-")) for path in folders), default=0)
    trainer.train(resume_from_checkpoint=done > 0 or None)
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        tell(args, metrics["eval_accuracy"], trainer.bagua_stats, done)


def tell(args: argparse.Namespace, right: float, stats: bagua.Stats | None, done: int) -> None:
    """Print the results, and write them to a file if that is wanted; `done` steps were made by earlier runs."""
    assert stats is not None
    sent = stats.total.bytes_sent / max(stats.steps - done, 1) / 1e6
    print(f"{args.algorithm} on {stats.size} ranks: {right:.2%} right after {stats.steps} steps, {sent:.3f} MB sent "
          f"per step and rank, compression {stats.total.compression_ratio:.2f}")  # fmt: skip
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        result = {"algorithm": args.algorithm, "accuracy": right, "steps": stats.steps, "mb_sent_per_step": sent}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

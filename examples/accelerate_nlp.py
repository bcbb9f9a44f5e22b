"""Train the model of hf_trainer.py in a loop written with Hugging Face Accelerate, and Bagua in place of DDP.

accelerate launch --multi_gpu --num_processes 2 examples/accelerate_nlp.py --algorithm bytegrad
bagua run --nproc-per-node 2 examples/accelerate_nlp.py --algorithm local_sgd --checkpoints out/accelerate

One line of the loop is Bagua's: the one that makes the accelerator. --multi_gpu is what makes `accelerate launch` start
several processes, also on a machine without GPUs, where --cpu would start one.
"""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import torch
from digits import make_options
from hf_trainer import Sentences, build_parser, make_model, optimizer_of, tell
from torch.utils.data import DataLoader

import bagua


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it went."""
    args = build_parser("A small BERT with Accelerate and Bagua.").parse_args(argv)
    from bagua.interop.accelerate import BaguaAccelerator

    accelerator: Any = BaguaAccelerator(
        cpu=not torch.cuda.is_available(),
        gradient_accumulation_steps=args.accumulate,
        mixed_precision=args.precision,
        algorithm=args.algorithm,
        bagua_options=make_options(args.algorithm),
    )
    torch.manual_seed(0)
    plain = make_model()
    optimizer = optimizer_of(args.algorithm, plain, args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, args.steps * accelerator.num_processes)
    loader, test = DataLoader(Sentences(4096, seed=1), args.batch_size), DataLoader(Sentences(512, seed=2), 64)
    model, optimizer, scheduler, loader, test = accelerator.prepare(plain, optimizer, scheduler, loader, test)

    first = 0
    if args.checkpoints is not None and (args.checkpoints / "model.safetensors").exists():
        accelerator.load_state(str(args.checkpoints))
        first = bagua.stats(model).steps
        accelerator.print(f"goes on at step {first}")
    done = first
    batches = chain.from_iterable(repeat(loader))
    while done < args.steps:
        with accelerator.accumulate(model):
            loss = model(**next(batches)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                done += 1
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and done % max(1, args.steps // 4) == 0:
            accelerator.print(f"step {done}: loss {loss.item():.4f}, {evaluate(accelerator, model, test):.2%} right")
            if args.checkpoints is not None:
                accelerator.save_state(str(args.checkpoints))

    right = evaluate(accelerator, model, test)
    if accelerator.is_main_process:
        tell(args, right, bagua.stats(model), first)
    accelerator.end_training()


@torch.no_grad()
def evaluate(accelerator: Any, model: Any, test: Any) -> float:
    """Return the fraction of sentences whose class is right; where replicas differ, of their mean."""
    right = total = 0
    model.eval()
    with accelerator.evaluation():
        for batch in test:
            guessed = model(**batch).logits.argmax(1)
            guessed, labels = accelerator.gather_for_metrics((guessed, batch["labels"]))
            right, total = right + int((guessed == labels).sum()), total + len(labels)
    model.train()
    return right / total


if __name__ == "__main__":
    main()

"""Train BERT to answer questions, from files of the SQuAD format.

python examples/squad/main.py --overwrite_output_dir                      one process, a small BERT from nothing
bagua run --nproc-per-node 2 examples/squad/main.py --algorithm bytegrad --overwrite_output_dir
bagua run --nproc-per-node 8 examples/squad/main.py --model_name_or_path bert-large-uncased --do_lower_case \
    --train_file train-v1.1.json --predict_file dev-v1.1.json --fp16 --output_dir out/squad   with transformers, on GPUs

The flags are those of the original's script. Without files of your own it takes the 360 questions about 60 invented
people beside it, and is asked about 20 others.
"""

from __future__ import annotations

import os
import sys

import torch
from squad_evaluate import evaluate
from squad_file import read_questions
from squad_flags import parse
from squad_model import load_model, save_model
from squad_training import train
from squad_windows import make_windows

import bagua


def choose_device(no_cuda: bool) -> torch.device:
    """Return the device of this rank."""
    if no_cuda or not torch.cuda.is_available():
        torch.set_num_threads(1)  # one for each rank
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate, as the flags say; returns the scores."""
    args = parse(argv)
    device = choose_device(args.no_cuda)
    bagua.init_process_group()
    torch.manual_seed(args.seed)
    own = args.model_name_or_path is None
    args.learning_rate = args.learning_rate or (1e-3 if own else 5e-5)
    args.num_train_epochs = args.num_train_epochs or (40.0 if own else 3.0)

    questions = read_questions(args.train_file, args.version_2_with_negative) if args.do_train else []
    asked = read_questions(args.predict_file, args.version_2_with_negative)
    model, encoder = load_model(args, questions)
    model.to(device)
    sizes = (args.max_seq_length, args.doc_stride, args.max_query_length)
    shown = make_windows(asked, encoder, *sizes)
    rank = torch.distributed.get_rank()
    if rank == 0:
        count = sum(param.numel() for param in model.parameters())
        print(f"{type(model).__name__} of {count:,} parameters; {len(questions)} questions to learn from, "
              f"{len(asked)} to answer", flush=True)  # fmt: skip

    def score() -> dict[str, float]:
        return evaluate(args, model, encoder, asked, shown, device)

    if args.do_train:
        train(args, model, encoder, make_windows(questions, encoder, *sizes), device, score)
        if rank == 0:
            save_model(args.output_dir, model, encoder)
    scores = score() if args.do_eval else {}
    if rank == 0 and scores:
        print(f"exact match {scores['exact']:.1f} %, F1 {scores['f1']:.1f} % of {scores['total']:.0f} questions; "
              f"answers are in {args.output_dir}", flush=True)  # fmt: skip
    bagua.destroy_process_group()
    return scores


if __name__ == "__main__":
    main(sys.argv[1:])

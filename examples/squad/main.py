"""Train BERT to answer questions with Hugging Face's Trainer and Bagua, from files of the SQuAD format.

python examples/squad/main.py --overwrite_output_dir                      one process, a small BERT from nothing
bagua run --nproc-per-node 2 examples/squad/main.py --algorithm bytegrad --overwrite_output_dir
bagua run --nproc-per-node 8 examples/squad/main.py --model bert-large-uncased --do_lower_case \
    --train_file train-v1.1.json --predict_file dev-v1.1.json --fp16 --output_dir out/squad   on GPUs

The flags are those of the original's script. Without files of your own it takes the 360 questions about 60 invented
people beside it, and is asked about 20 others. It needs `pip install 'bagua[transformers]'`.
"""

from __future__ import annotations

import sys

import torch
from squad_answers import Scorer
from squad_file import read_questions
from squad_flags import parse
from squad_windows import make_windows

import bagua


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train and evaluate, as the flags say; returns the scores."""
    args = parse(argv)
    try:
        from squad_model import load_model
        from squad_training import last_checkpoint, make_arguments, make_trainer, train
        from transformers import set_seed  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise SystemExit(f"this script needs transformers: pip install 'bagua[transformers]' ({error})") from error

    if args.no_cuda or not torch.cuda.is_available():
        torch.set_num_threads(1)  # one for each rank
    bagua.init_process_group()
    torch.distributed.barrier()  # each rank has looked whether the output directory is empty
    arguments = make_arguments(args)
    set_seed(args.seed)

    questions = read_questions(args.train_file, args.version_2_with_negative) if args.do_train else []
    asked = read_questions(args.predict_file, args.version_2_with_negative)
    last = last_checkpoint(args.output_dir) if args.resume and args.do_train else None
    with arguments.main_process_first():  # the others find what it has downloaded
        model, tokenizer = load_model(args, questions, last)
    sizes = (args.max_seq_length, args.doc_stride, args.max_query_length)
    shown = make_windows(asked, tokenizer, *sizes)
    scorer = Scorer(args, asked, shown)
    learned = make_windows(questions, tokenizer, *sizes)
    trainer = make_trainer(args, arguments, model, tokenizer, learned, shown, scorer)
    first = trainer.is_world_process_zero()
    if first:
        print(f"{type(model).__name__} of {model.num_parameters():,} parameters; {len(questions)} questions to learn "
              f"from, {len(asked)} to answer", flush=True)  # fmt: skip
    if args.do_train:
        train(args, trainer, last)
    if not args.do_eval:
        return {}
    found = trainer.evaluate()
    scores = {name: found[f"eval_{name}"] for name in ("exact", "f1", "total")}
    if first:
        scorer.write(args.output_dir)
        print(f"exact match {scores['exact']:.1f} %, F1 {scores['f1']:.1f} % of {scores['total']:.0f} questions; "
              f"answers are in {args.output_dir}", flush=True)  # fmt: skip
    return scores


if __name__ == "__main__":
    main(sys.argv[1:])

"""The command line: the flags of the original's script, with defaults that run on a CPU."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

import bagua

__all__ = ["parse"]

HERE = Path(__file__).resolve().parent
WITHOUT_EFFECT = {
    "lang_id": "it belongs to models of several languages",
    "fp16_opt_level": "there is no apex; --fp16 is torch.autocast",
    "server_ip": "there is no remote debugger",
    "server_port": "there is no remote debugger",
    "threads": "files are read in one thread",
    "overwrite_cache": "features are made anew at each start",
    "verbose_logging": "nothing more could be said",
}


def parse(argv: list[str] | None) -> Namespace:
    """Read the command line; what does not go together ends the program with exit code 2."""
    parser = _get_args_parser()
    args = parser.parse_args(argv)
    for name, reason in WITHOUT_EFFECT.items():
        if getattr(args, name) not in (None, False):
            print(f"--{name} has no effect: {reason}", file=sys.stderr)
    if not args.do_train and not args.do_eval:
        args.do_train = args.do_eval = True
    for name in ("train_file", "predict_file"):
        given = getattr(args, name)
        path = HERE / f"tiny-{'train' if name == 'train_file' else 'dev'}.json" if given is None else Path(given)
        path = path if given is None or args.data_dir is None else Path(args.data_dir) / path
        if not path.is_file():
            parser.error(f"--{name}: there is no file {path}")
        setattr(args, name, path)
    full = args.output_dir.is_dir() and any(args.output_dir.iterdir())
    if full and args.do_train and not (args.overwrite_output_dir or args.resume):
        parser.error(f"--output_dir: {args.output_dir} is not empty; --overwrite_output_dir, or --resume to go on")
    if args.model_name_or_path is None and not args.do_train:
        parser.error("--model_name_or_path: the directory of a trained model is needed to evaluate only")
    return args


def _count(text: str) -> int:
    if int(text) < 1:
        raise ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def _get_args_parser() -> ArgumentParser:
    parser = ArgumentParser(description="Question answering with BERT on files of the SQuAD format, with Bagua.")
    add = parser.add_argument
    add("--do_train", action="store_true", help="train; without --do_train and --do_eval both are done")
    add("--do_eval", action="store_true", help="answer the questions of --predict_file and compare")
    _add_model(parser)
    _add_data(parser)
    _add_training(parser)
    _add_bagua(parser)
    group = parser.add_argument_group("accepted, without effect")
    for name, reason in WITHOUT_EFFECT.items():
        if name in ("overwrite_cache", "verbose_logging"):
            group.add_argument(f"--{name}", action="store_true", help=reason)
        else:
            group.add_argument(f"--{name}", metavar="VALUE", help=reason)
    return parser


def _add_model(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model_type", choices=["bert"], default="bert", help="the one architecture there is")
    add("--model_name_or_path", "--model", metavar="NAME_OR_PATH", help="an --output_dir of this script, or another "
        "BERT of transformers; without: a small one that starts from random weights")  # fmt: skip
    add("--config_name", metavar="NAME_OR_PATH", help="if another than --model_name_or_path")
    add("--tokenizer_name", metavar="NAME_OR_PATH", help="if another; or a file of word pieces, one a line (vocab.txt)")
    add("--cache_dir", metavar="DIR", help="where transformers keeps what it downloads")
    add("--hidden_size", type=_count, default=128, help="width of the small BERT (%(default)s; BERT-Large: 1024)")
    add("--num_layers", type=_count, default=2, help="of the small BERT (%(default)s; BERT-Large: 24)")
    add("--num_heads", type=_count, default=4, help="attention heads of the small BERT (%(default)s; BERT-Large: 16)")
    add("--dropout", type=float, default=0.1, help="probability, of the small BERT (%(default)s)")
    add("--vocab_size", type=_count, default=4000, help="most word pieces learned from --train_file (%(default)s)")
    add("--do_lower_case", action="store_true", help="ignore case and accents; the small BERT always does")


def _add_data(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("data").add_argument
    add("--data_dir", metavar="DIR", help="where --train_file and --predict_file are")
    add("--train_file", metavar="FILE", help="to train on (default: 360 questions that come with this script)")
    add("--predict_file", metavar="FILE", help="to evaluate on (default: 120 questions about other people)")
    add("--output_dir", type=Path, default=Path("out/squad"), metavar="DIR", help="for model and answers (%(default)s)")
    add("--overwrite_output_dir", action="store_true", help="although it is not empty; old checkpoints go")
    add("--version_2_with_negative", action="store_true", help="some questions have no answer")
    add("--null_score_diff_threshold", type=float, default=0.0, metavar="X",
        help='answer "none" if its score is higher than the best answer\'s by more (%(default)s)')  # fmt: skip
    add("--max_seq_length", type=_count, default=384, help="tokens of question and paragraph (%(default)s)")
    add("--doc_stride", type=_count, default=128, help="tokens between windows of a long paragraph (%(default)s)")
    add("--max_query_length", type=_count, default=64, help="tokens of a question (%(default)s)")
    add("--n_best_size", type=_count, default=20, help="answers kept for each question (%(default)s)")
    add("--max_answer_length", type=_count, default=30, help="tokens of an answer (%(default)s)")


def _add_training(parser: ArgumentParser) -> None:
    add = parser.add_argument_group("training").add_argument
    add("--per_gpu_train_batch_size", type=_count, default=8, help="questions per rank and pass (%(default)s)")
    add("--per_gpu_eval_batch_size", type=_count, default=32, help="windows per rank and pass (%(default)s)")
    add("--gradient_accumulation_steps", type=_count, default=1, help="passes for one step (%(default)s)")
    add("--learning_rate", type=float, help="default: 5e-5, or 1e-3 for the small BERT from nothing")
    add("--weight_decay", type=float, default=0.0, help="of matrices (%(default)s)")
    add("--adam_epsilon", type=float, default=1e-8, help="%(default)s")
    add("--max_grad_norm", type=float, default=1.0, help="longer gradients are clipped (%(default)s)")
    add("--num_train_epochs", type=float, help="default: 3, or 40 for the small BERT from nothing")
    add("--max_steps", type=int, default=-1, help="instead of epochs, if positive")
    add("--warmup_steps", type=int, default=0, help="steps in which the learning rate grows (%(default)s)")
    add("--logging_steps", type=_count, default=50, help="steps between two lines (%(default)s)")
    add("--evaluate_during_training", action="store_true", help="evaluate at each line")
    add("--save_steps", type=int, default=0, help="steps between two checkpoints, of which two are kept; 0: none")
    add("--eval_all_checkpoints", action="store_true", help="evaluate each checkpoint when it is saved")
    add("--resume", action="store_true", help="go on from the last checkpoint, if there is one")
    add("--seed", type=int, default=42, help="%(default)s")
    add("--no_cuda", action="store_true", help="stay on the CPU")
    add("--fp16", action="store_true", help="mixed precision: fp16 with loss scaling on a GPU, bf16 on a CPU")


def _add_bagua(parser: ArgumentParser) -> None:
    names = [row.name for row in bagua.algorithms.available()]
    add = parser.add_argument_group("bagua").add_argument
    add("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME", help=f"one of {', '.join(names)}")
    add("--async-sync-interval", type=int, default=500, help="of the algorithm async, milliseconds (%(default)s)")
    add("--async-warmup-steps", type=int, default=0, help="of the algorithm async (%(default)s)")
    add("--fuse-optimizer", action="store_true", help="step on flat tensors with bagua.optim.fuse")
    add("--prof", type=int, default=-1, metavar="STEP", help="profile ten steps from this one, print, and stop")

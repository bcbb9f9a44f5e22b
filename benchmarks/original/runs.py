"""Which example runs with which flags."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ALGORITHMS", "Run", "all_runs"]

ALGORITHMS = ("gradient_allreduce", "bytegrad", "decentralized", "low_precision_decentralized", "qadam", "async")
_SMALL_RESNET = "--model resnet18 --batch-size 2 --num-warmup-batches 1 --num-batches-per-iter 2 --num-iters 2"
_DIGITS = "--epochs 2 --batch-size 32 --test-batch-size 64 --log-interval 1"
_IMAGES = "{data}/images -a resnet18 -j 1 -b 4 --epochs 2 -p 1 --lr 0.01 --warmup-epochs 0"
_SQUAD = (
    "--model_type bert --model_name_or_path {data}/bert --do_train --do_eval --do_lower_case "
    "--train_file {data}/train.json --predict_file {data}/dev.json --learning_rate 1e-3 --num_train_epochs 2 "
    "--max_seq_length 32 --doc_stride 8 --max_query_length 8 --output_dir {here}/out --per_gpu_eval_batch_size 8 "
    "--per_gpu_train_batch_size 4 --overwrite_output_dir --overwrite_cache --save_steps 0 --logging_steps 4"
)


@dataclass(frozen=True)
class Run:
    """An example with flags.

    Args:
        example: folder below `examples`.
        script: in that folder.
        flags: what the table names.
        size: more flags, which keep the run short; `{data}` and `{here}` stand for folders.
        ranks: processes.
        elastic: started with `bagua.distributed.run` and a rendezvous instead of `bagua.distributed.launch`.
        again: run in the folder of the previous run, so that it finds what that one saved.
    """

    example: str
    script: str
    flags: str = ""
    size: str = ""
    ranks: int = 2
    elastic: bool = False
    again: bool = False


def all_runs() -> list[Run]:
    """Every example with every algorithm that it offers, and its other flags once."""
    runs = [Run("communication_primitives", "main.py", ranks=8)]  # its alltoall_v has eight parts
    runs += [Run("benchmark", "synthetic_benchmark.py", f"--algorithm {name}", _SMALL_RESNET) for name in ALGORITHMS]
    runs += [
        Run("benchmark", "synthetic_benchmark.py", flag, _SMALL_RESNET)
        for flag in ("--fuse-optimizer", "--deterministic", "--amp")
    ]
    runs += [Run("mnist", "main.py", f"--algorithm {name}", _DIGITS) for name in ALGORITHMS]
    runs += [
        Run("mnist", "main.py", flag, _DIGITS) for flag in ("--fuse-optimizer", "--set-deterministic --save-model")
    ]
    experts = "--num-local-experts 2"
    runs += [Run("moe", "mnist_main.py", f"--algorithm {name} {experts}", _DIGITS) for name in ALGORITHMS]
    runs += [
        Run("moe", "mnist_main.py", flag, _DIGITS) for flag in ("--num-local-experts 0", f"{experts} --save-model")
    ]
    runs += [Run("elastic_training", "main.py", f"--algorithm {ALGORITHMS[0]}", _DIGITS, elastic=True)]
    resumed = Run("elastic_training", "main.py", "(resumed) --epochs 3", _DIGITS, elastic=True, again=True)
    runs += [resumed]
    runs += [Run("imagenet", "main.py", f"--algorithm {name}", _IMAGES) for name in ALGORITHMS]
    runs += [
        Run("imagenet", "main.py", "--save-checkpoint", _IMAGES),
        Run("imagenet", "main.py", "--resume checkpoint.pth.tar --evaluate", _IMAGES, again=True),
        Run("imagenet", "main.py", "--amp", _IMAGES),
    ]
    runs += [Run("squad", "main.py", f"--algorithm {name}", _SQUAD) for name in ALGORITHMS]
    runs += [Run("squad", "main.py", "--fuse-optimizer", _SQUAD)]
    return runs

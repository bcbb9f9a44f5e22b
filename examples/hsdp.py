"""Train a small transformer with torch's own hybrid sharding; the mesh says which backend averages the replicas.

torchrun --nproc-per-node 4 examples/hsdp.py --backend bagua:uint8      two replicas, each sharded over two ranks
torchrun --nproc-per-node 4 examples/hsdp.py --backend gloo             the same in full precision
torchrun --nproc-per-node 2 examples/hsdp.py --backend bagua:uint8:min_bytes=4096

Nothing but `import bagua` and the name of the backend differs from a script without Bagua. Replicas stand for hosts:
what they exchange goes over the slow network. The text comes with Python; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from char_lm import CharLM, count, draw, load_text
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import bagua


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="A language model with hybrid sharding (FSDP2).")
    parser.add_argument("--backend", default="bagua:uint8", metavar="NAME",
                        help="of the replicate dimension: gloo, nccl, bagua:CODEC (default: %(default)s)")  # fmt: skip
    parser.add_argument("--replicas", type=count, default=2, help="the ranks are divided among them (%(default)s)")
    parser.add_argument("--steps", type=count, default=60, help="training steps (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=8, help="pieces of text per rank and step (%(default)s)")
    parser.add_argument("--context", type=count, default=48, help="characters of a piece (%(default)s)")
    parser.add_argument("--width", type=count, default=128, help="features of a character (%(default)s)")
    parser.add_argument("--layers", type=count, default=2, help="transformer blocks (%(default)s)")
    parser.add_argument("--lr", type=float, default=3e-3, help="learning rate of AdamW (%(default)s)")
    parser.add_argument("--every", type=count, default=10, help="steps between two lines of output (%(default)s)")
    return parser


def replicate_backend(name: str) -> str:
    """Return a name that torch knows; one with options becomes known by being parsed."""
    return bagua.Backend.parse(name) if name.startswith("bagua") else name


def mean_over_ranks(loss: Tensor) -> float:
    """Return the mean of all ranks' losses; a number is too small to be compressed."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it goes."""
    args = build_parser().parse_args(argv)
    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if gpu else "gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    if size % args.replicas:
        raise SystemExit(f"--replicas {args.replicas}: {size} ranks cannot be divided among them")

    mesh = init_device_mesh(
        device.type,
        (args.replicas, size // args.replicas),
        mesh_dim_names=("replicate", "shard"),
        backend_override={"replicate": replicate_backend(args.backend)},
    )
    torch.manual_seed(0)
    model = CharLM(args.width, args.layers, max(args.width // 32, 1), args.context, dropout=0.0).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    text = load_text()
    torch.manual_seed(1 + rank)  # each rank draws other pieces
    started = time.perf_counter()
    for step in range(1, args.steps + 1):
        inputs, targets = (each.to(device) for each in draw(text, args.batch_size, args.context))
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % args.every == 0 or step == args.steps:
            mean = mean_over_ranks(loss)
            if rank == 0:
                print(f"step {step}/{args.steps}  loss {mean:.4f}", flush=True)
    seconds = time.perf_counter() - started

    if rank == 0:
        print(f"{args.steps} steps in {seconds:.1f} s, replicas over {args.backend}")
        group = mesh.get_group("replicate")
        if isinstance(group, bagua.backend.CompressedProcessGroup) and group.traffic.operations:
            traffic = group.traffic
            print(
                f"{traffic.operations} all-reduces compressed: {traffic.bytes_sent / args.steps / 1e3:.0f} kB sent per "
                f"step, {traffic.bytes_exact / traffic.bytes_sent:.2f} times fewer than in full precision"
            )
    if argv is None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

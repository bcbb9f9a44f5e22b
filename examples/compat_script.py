"""A training script in the style of the original Bagua, unchanged but for the device.

python -m bagua.distributed.launch --nproc_per_node=2 examples/compat_script.py
python examples/compat_script.py --algorithm bytegrad --epochs 3          one process

Data are the handwritten digits that come with scikit-learn; nothing is downloaded.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import bagua.torch_api as bagua
from bagua.torch_api.algorithms import Algorithm, GlobalAlgorithmRegistry


def count(text: str) -> int:
    """Read a number of the command line that is 1 at least."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, not {text}")
    return int(text)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="digits with bagua.torch_api")
    parser.add_argument(
        "--algorithm",
        default="gradient_allreduce",
        choices=GlobalAlgorithmRegistry.available_algorithms(),
        help="what is exchanged between the ranks (default: %(default)s)",
    )
    parser.add_argument("--epochs", type=count, default=5, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="per rank")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate for one rank (%(default)s)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where to train (%(default)s)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Train; returns the mean loss of every epoch, which rank 0 prints."""
    args = parse(argv)
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", bagua.get_local_rank())
        torch.cuda.set_device(device)
    bagua.init_process_group()

    images, labels = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    dataset = TensorDataset(images.float() / 16, labels.long())
    sampler = DistributedSampler(dataset, bagua.get_world_size(), bagua.get_rank(), seed=0)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)

    torch.manual_seed(bagua.get_rank())  # with_bagua makes everyone's weights those of rank 0
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * bagua.get_world_size(), momentum=0.9)
    model = model.with_bagua([optimizer], Algorithm.init(args.algorithm))  # pyright: ignore

    losses: list[float] = []
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2, device=device)
        for batch, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch.to(device)), target.to(device))
            loss.backward()
            optimizer.step()
            total += torch.stack([loss.detach(), torch.ones((), device=device)])
        bagua.allreduce_inplace(total, op=bagua.ReduceOp.SUM)
        losses.append(float(total[0] / total[1]))
        if bagua.get_rank() == 0:
            print(f"epoch {epoch}: loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
    bagua.destroy_process_group()

"""Train a small net with a mixture of experts on handwritten digits; each rank holds some of the experts.

python examples/moe.py                                                   one process, all experts
bagua run --nproc-per-node 2 examples/moe.py --experts 4                 two ranks with four experts each
bagua run --nproc-per-node 2 examples/moe.py --k 2 --codec minmax_uint8 --algorithm bytegrad
python examples/moe.py --compare                                         beside a dense net of equal compute

The data comes with scikit-learn (`pip install '.[demo]'`); nothing is downloaded. An image is a token.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from digits import choose_device, count, load_data, make_loader, make_optimizer, make_options, replicas_differ
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import bagua

WIDTH = 32


def feed_forward(hidden: int) -> nn.Module:
    """Return the network that an expert is."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))


class Net(nn.Module):
    """Pixels to features, experts or one dense network beside them, and logits."""

    def __init__(self, args: argparse.Namespace, dense: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(64, WIDTH)
        # A token goes through k experts, so a dense network k times as wide does as many multiplications.
        self.middle = (
            feed_forward(args.hidden * args.k)
            if dense
            else bagua.moe.MoE(
                WIDTH,
                feed_forward(args.hidden),
                args.experts,
                args.k,
                capacity_factor=args.capacity_factor,
                eval_capacity_factor=2 * args.capacity_factor,
                noisy_gate_policy=args.noise,
                codec=args.codec,
                grad_codec=args.codec,
            )
        )
        self.out = nn.Linear(WIDTH, 10)
        if isinstance(self.middle, bagua.moe.MoE):
            for part in self.middle.bagua_moe.experts.modules():
                if isinstance(part, nn.Linear):
                    part.reset_parameters()  # the layer copies one expert; different ones learn sooner

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits [B, 10] and the load-balancing loss."""
        x = F.relu(self.inp(images.flatten(1)))
        if isinstance(self.middle, bagua.moe.MoE):
            more, l_aux, _ = self.middle(x)
        else:
            more, l_aux = self.middle(x), x.new_zeros(())
        return self.out(x + more), l_aux


def accuracy(model: nn.Module, data: TensorDataset, device: torch.device) -> float:
    """Return the fraction of `data` that `model` gets right. With experts all ranks call it."""
    images, labels = (tensor.to(device) for tensor in data.tensors)
    model.eval()
    with torch.no_grad():
        right = (model(images)[0].argmax(1) == labels).float().mean().item()
    model.train()
    return right


def train(args: argparse.Namespace, seed: int, dense: bool, quiet: bool) -> tuple[float, float]:
    """Train one net; return the mean loss of the last epoch on this rank, and the accuracy on the test set."""
    device, rank, size = choose_device(args.device), torch.distributed.get_rank(), torch.distributed.get_world_size()
    train_set, test_set = load_data()
    torch.manual_seed(seed + 1000 * rank)  # experts differ by rank; everything else becomes rank 0's
    loader = make_loader(train_set, args.batch_size, seed, rank, size)
    model = Net(args, dense).to(device)
    optimizer = make_optimizer(args.algorithm, model.parameters(), args.lr)
    model = bagua.distribute(model, optimizer, args.algorithm, **make_options(args.algorithm))
    mean_loss = right = 0.0
    for epoch in range(args.epochs):
        loader.sampler.set_epoch(epoch)  # pyright: ignore[reportAttributeAccessIssue]
        losses, dropped, rows = [], 0, torch.zeros(1)
        for images, labels in loader:
            logits, l_aux = model(images.to(device))
            loss = F.cross_entropy(logits, labels.to(device))
            (loss + args.aux * l_aux).backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if not dense:
                layer = getattr(model.middle, "bagua_moe")  # noqa: B009 (nn.Module types attributes as Tensor or Module)
                dropped, rows = dropped + layer.num_dropped, rows + layer.exp_counts
        if epoch == args.epochs - 1 and replicas_differ(args.algorithm):
            bagua.average_parameters(model)
        right = accuracy(model, test_set, device)
        mean_loss = torch.stack(losses).mean().item() if losses else float("nan")
        if rank == 0 and not quiet:
            line = f"epoch {epoch + 1}/{args.epochs}  loss {mean_loss:.4f}  test {right:.2%}"
            if not dense:
                choices = args.k * len(losses) * args.batch_size
                load = (rows.max() / rows.mean()).item()
                line += f"  dropped {dropped / max(choices, 1):.1%}  busiest expert {load:.2f} times the mean"
            print(line, flush=True)
    bagua.detach(model)
    return mean_loss, right


def compare(args: argparse.Namespace) -> None:
    """Train experts and a dense net of equal compute, with several seeds, and print both."""
    for dense in (False, True):
        torch.manual_seed(0)
        size = sum(param.numel() for param in Net(args, dense).parameters())
        found = [train(args, seed, dense, quiet=True) for seed in range(args.seed, args.seed + args.seeds)]
        losses, rights = zip(*found, strict=True)
        if torch.distributed.get_rank() == 0:
            name = "dense" if dense else "experts"
            spread = statistics.stdev(rights) if len(rights) > 1 else 0.0
            print(
                f"{name:8} parameters of a rank {size:7}  training loss {statistics.mean(losses):.4f}  "
                f"test {statistics.mean(rights):.2%} (deviation {spread:.2%}, {len(rights)} seeds)",
                flush=True,
            )


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description="A mixture of experts on handwritten digits.")
    names = [row.name for row in bagua.algorithms.available()]
    parser.add_argument("--algorithm", choices=names, default="gradient_allreduce", metavar="NAME",
                        help=f"for all but the experts; one of: {', '.join(names)} (default: %(default)s)")  # fmt: skip
    parser.add_argument("--experts", type=count, default=4, help="experts of each rank (%(default)s)")
    parser.add_argument("--k", type=int, choices=[1, 2], default=1, help="experts for an image (%(default)s)")
    parser.add_argument("--hidden", type=count, default=16, help="width of an expert (%(default)s)")
    parser.add_argument("--capacity-factor", type=float, default=1.25,
                        help="places of an expert, relative to an even load (%(default)s)")  # fmt: skip
    parser.add_argument("--noise", choices=["None", "Jitter", "RSample"], default="None",
                        help="of the gate in training (%(default)s)")  # fmt: skip
    parser.add_argument("--aux", type=float, default=0.01, help="weight of the load-balancing loss (%(default)s)")
    parser.add_argument("--codec", default=None, metavar="NAME",
                        help="codec of rows and their gradients, minmax_uint8 for 8 bits (default: exact)")  # fmt: skip
    parser.add_argument("--epochs", type=count, default=10, help="passes over the data (%(default)s)")
    parser.add_argument("--batch-size", type=count, default=32, help="images per rank and step (%(default)s)")
    parser.add_argument("--lr", type=float, default=None, help="default: 0.1 with SGD, 0.002 with the others")
    parser.add_argument("--seed", type=int, default=0, help="of weights and data, the first one (%(default)s)")
    parser.add_argument("--compare", action="store_true", help="beside a dense net with as many multiplications")
    parser.add_argument("--seeds", type=count, default=5, help="runs of each with --compare (%(default)s)")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="auto",
                        help="auto: a GPU if there is one for each rank of this machine (%(default)s)")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> None:
    """Train, and print on rank 0 how it goes."""
    args = build_parser().parse_args(argv)
    torch.set_num_threads(1)  # images this small are slower with more
    bagua.init_process_group()
    if args.compare:
        compare(args)
    else:
        _, right = train(args, args.seed, dense=False, quiet=False)
        if torch.distributed.get_rank() == 0:
            size = torch.distributed.get_world_size()
            print(
                f"{args.experts * size} experts on {size} rank{'s' * (size > 1)}: {right:.2%} of the test images right"
            )
    bagua.destroy_process_group()


if __name__ == "__main__":
    main()

"""What all systems train: a character language model, with the same batches whatever the number of ranks."""

from __future__ import annotations

import argparse
import os
import time
import zlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bagua.algorithms.rounds import interval_of
from benchmarks.char_lm import CharLM, draw_windows, even_windows, load_text
from benchmarks.convergence.configurations import Configuration, all_configurations, make_optimizer

__all__ = ["CharModel", "Task", "configuration_of", "longest_interval", "parse", "state_bytes"]

_LENGTH = 16  # characters of a window
_RATES = {"sgd": 0.4, "adam": 0.01, "lamb": 0.03}  # as in benchmarks.convergence
_DECAY = 1e-4
_LONG_RUN = 10_000  # steps, for an algorithm whose options depend on them


def parse() -> argparse.Namespace:
    """Return the arguments of a rank, the same for all systems."""
    parser = argparse.ArgumentParser(description="One rank of benchmarks.faults.")
    parser.add_argument("--folder", type=Path, required=True, help="for journals; the file `stop` holds the last step")
    parser.add_argument("--algorithm", default="gradient_allreduce")
    parser.add_argument("--global-batch", type=int, default=48, help="windows of all ranks in a step")
    parser.add_argument("--table", type=int, default=0, help="rows of a second embedding, to make the model larger")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=0.0, help="emulated compute of a step")
    parser.add_argument("--losses-every", type=int, default=0, help="steps between two losses written down; 0: none")
    parser.add_argument("--stage-steps", type=int, default=200, help="for which optimizers choose their stages")
    parser.add_argument("--commit-every", type=int, default=10, help="steps, for systems that restart")
    return parser.parse_args()


class CharModel(CharLM):
    """`CharLM`, and an embedding of the last two characters that makes it as large as one likes.

    Args:
        table: rows of that embedding; 0 for none.

    Attributes:
        began: when the last forward pass began, on the clock of the machine (CLOCK_MONOTONIC).
    """

    def __init__(self, table: int) -> None:
        super().__init__()
        self.pairs = nn.Embedding(table, self.characters.embedding_dim) if table else None
        self.began = 0.0

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return logits [B, T, V] of the next character. What hooks do before it has been done when `began` is set."""
        self.began = time.monotonic()
        embedded_BTW = self.characters(x_BT)
        if self.pairs is not None:
            before_BT = F.pad(x_BT[:, :-1], (1, 0))
            embedded_BTW = embedded_BTW + self.pairs((x_BT * 7919 + before_BT) % self.pairs.num_embeddings)
        return self.out(self.recurrent(embedded_BTW)[0])


class Task:
    """Model, optimizer and batches of one rank.

    Args:
        args: of `parse`.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        # A rank that arrives holds nothing that the others have: else a part of the state would not be sent to it.
        torch.manual_seed(args.seed + 1_000_000 * int(os.environ.get("BAGUA_ARRIVES", "0")))
        self._args, self._text = args, load_text()
        self.configuration = configuration_of(args.algorithm)
        self.model = CharModel(args.table)
        kind = self.configuration.optimizer or self.configuration.family
        rate = _RATES[self.configuration.family]
        self.optimizer = make_optimizer(kind, self.model.parameters(), rate, args.stage_steps)
        if args.table:  # a step then changes each weight and each momentum: nothing is spared in an arrival
            for group in self.optimizer.param_groups:
                group["weight_decay"] = _DECAY
        self._stop = args.folder / "stop"
        self._speed = Path(os.environ.get("BAGUA_LAB_SPEED_FILE", "/dev/null"))

    def is_over(self, step: int) -> bool:
        """Whether the job ends after `step` steps."""
        try:
            return step >= int(self._stop.read_text())
        except (FileNotFoundError, ValueError):
            return False

    def batch(self, step: int, rank: int, size: int) -> tuple[Tensor, Tensor]:
        """This rank's part of the batch of a step."""
        generator = torch.Generator().manual_seed(self._args.seed * 1_000_003 + step)
        inputs, targets = draw_windows(self._text.train, self._args.global_batch, _LENGTH, generator)
        return inputs[rank::size], targets[rank::size]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Cross entropy of a batch, after the emulated compute."""
        inputs, targets = batch
        logits = model(inputs)
        if self._args.step_ms:
            speed = float(self._speed.read_text() or 1)
            time.sleep(self._args.step_ms / 1000 / speed)
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Cross entropy on text that is not trained on."""
        inputs, targets = even_windows(self._text.test, 256, _LENGTH)
        return F.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten()).item()

    @torch.no_grad()
    def digest(self) -> int:
        """Of all weights."""
        found = 0
        for parameter in self.model.parameters():
            found = zlib.crc32(parameter.detach().contiguous().view(-1).numpy().data, found)
        return found


def configuration_of(algorithm: str) -> Configuration:
    """Return the first row of benchmarks.convergence that has the algorithm from the first step on."""
    return next(each for each in all_configurations() if each.algorithm == algorithm and not each.warmup)


def longest_interval(algorithm: str) -> int:
    """Return the longest number of steps from one exchange of an algorithm to the next."""
    configuration = configuration_of(algorithm)
    kind = configuration.optimizer or configuration.family
    optimizer = make_optimizer(kind, [nn.Parameter(torch.zeros(1))], _RATES[configuration.family], steps=1)
    local = [group.get("local_step_clipper", 1) for group in optimizer.param_groups]  # of 0/1 Adam
    return max(interval_of(configuration.make(_LONG_RUN)), *local)


def state_bytes(task: Task) -> int:
    """Bytes of weights and optimizer state."""
    tensors = [*task.model.parameters(), *task.model.buffers()]
    for state in task.optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

"""Words that few batches hold, with codecs that lose zeros: `python -m benchmarks.rare_words --json out.json`.

Words have Zipf's frequencies. Each has a class; the label depends on the classes of two words. AdamW trains an
embedding and two layers on four ranks. "not cleared" is what `gradient_allreduce` does without the sum that tells which
rows nobody uses. No time is measured. One run of three seeds takes some 10 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import bagua
from bagua.algorithms import Algorithm, Context, DiLoCo, GradientAllReduce
from bagua.bench.spawned import run_ranks

__all__ = ["main"]

WORDS, WIDTH, CLASSES, LABELS, BATCH, RANKS = 8000, 64, 8, 8, 64, 4


class NotCleared(GradientAllReduce):
    """Without the sum that tells which rows nobody uses."""

    def _clears_idle_rows(self, ctx: Context) -> bool:
        return False


class Words:
    """Draws of a seed: word pairs and their labels, one in ten of which says nothing."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(1000 + seed)
        self._frequencies = 1 / torch.arange(1.0, WORDS + 1)
        self._classes = torch.randint(0, CLASSES, (WORDS,), generator=generator)
        self._labels = torch.randint(0, LABELS, (CLASSES, CLASSES), generator=generator)

    def draw(self, number: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Pairs of words [number, 2] and labels [number]."""
        pairs = torch.multinomial(self._frequencies, 2 * number, True, generator=generator).view(number, 2)
        labels = self._labels[self._classes[pairs[:, 0]], self._classes[pairs[:, 1]]]
        noise = torch.randint(0, LABELS, (number,), generator=generator)
        return pairs, torch.where(torch.rand(number, generator=generator) < 0.1, noise, labels)


def configurations() -> dict[str, Algorithm]:
    """What is compared."""
    made: dict[str, Algorithm] = {"full precision": GradientAllReduce(), "int4": GradientAllReduce(codec="int4")}
    for bits in (1, 2):
        made[f"eden, {bits} bits"] = GradientAllReduce(codec=f"eden:bits={bits}")
        made[f"eden, {bits} bits, not cleared"] = NotCleared(codec=f"eden:bits={bits}")
    return {**made, "diloco": DiLoCo()}


def train(words: Words, algorithm: Algorithm, rank: int, seed: int, steps: int) -> dict[str, float]:
    """The mean model's loss on other draws, and how far words moved that were drawn never, or up to three times."""
    torch.manual_seed(seed)
    layers = nn.Flatten(1), nn.Linear(2 * WIDTH, 128), nn.GELU(), nn.Linear(128, LABELS)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), *layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    bagua.distribute(model, optimizer, algorithm)
    before, times = next(model.parameters()).detach().clone(), torch.zeros(WORDS)
    for step in range(steps):
        generators = [torch.Generator().manual_seed((seed * steps + step) * RANKS + each) for each in range(RANKS)]
        draws = [words.draw(BATCH, each) for each in generators]
        for drawn, _ in draws:
            times += torch.bincount(drawn.flatten(), minlength=WORDS)
        pairs, labels = draws[rank]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pairs), labels).backward()
        optimizer.step()
        schedule.step()
    bagua.average_parameters(model)
    moves = (next(model.parameters()).detach() - before).square().mean(1)
    unused, rare = (float(moves[chosen].mean().sqrt()) for chosen in (times == 0, (times > 0) & (times <= 3)))
    pairs, labels = words.draw(20000, torch.Generator().manual_seed(9 + seed))
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(pairs), labels)
    bagua.detach(model)
    return {"loss": float(loss), "unused_rms": unused, "rare_rms": rare, "unused_words": float((times == 0).sum())}


def _rank_main(rank: int, answer: Path, seeds: Sequence[int], steps: int) -> None:
    found: dict[str, list[dict[str, float]]] = {}
    for seed in seeds:
        words = Words(seed)
        for name, algorithm in configurations().items():
            found.setdefault(name, []).append(train(words, algorithm, rank, seed, steps))
            if rank == 0:
                print(f"seed {seed}, {name}: {found[name][-1]}", flush=True)
    if rank == 0:
        answer.write_text(json.dumps(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; see the module's text."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="101,102,103", help="of words, models and draws")
    parser.add_argument("--steps", type=int, default=600, help="of training")
    parser.add_argument("--json", type=Path, default=None, help="write the results to this file")
    options = parser.parse_args(argv)
    try:
        seeds = [int(each) for each in options.seeds.split(",")]
    except ValueError:
        parser.error(f"--seeds: expected numbers with commas between, got {options.seeds!r}")
    with TemporaryDirectory() as folder:
        answer = Path(folder) / "found.json"
        run_ranks(_rank_main, RANKS, answer, seeds, options.steps)
        found: dict[str, Any] = json.loads(answer.read_text())
    exact = found["full precision"]
    for name, runs in found.items():
        behind = [100 * (run["loss"] / best["loss"] - 1) for run, best in zip(runs, exact, strict=True)]
        losses = " ".join(f"{run['loss']:.4f}" for run in runs)
        moved = max(run["unused_rms"] for run in runs)
        rare = sum(run["rare_rms"] for run in runs) / len(runs)
        print(
            f"{name:28} loss {losses}  behind {sum(behind) / len(behind):+.2f} %  unused words moved {moved:.4f}  "
            f"those of 1 to 3 draws {rare:.4f}"
        )
    if options.json is not None:
        settings = {"seeds": seeds, "steps": options.steps, "torch": torch.__version__}
        options.json.write_text(json.dumps({"settings": settings, "runs": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

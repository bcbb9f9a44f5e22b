"""Token-budget batches with equal cost on all ranks in every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bagua.data.balance.complexities import as_complexities, fingerprint
from bagua.data.balance.progress import Progress, check_flag, check_seed, check_share

__all__ = ["TokenBudgetBatchSampler"]


class TokenBudgetBatchSampler(Progress[list[int]]):
    """Batch sampler: samples of similar length, with at most `max_tokens` tokens per batch after padding.

    Samples are sorted by length, jittered, and cut into steps of R * k samples, with k as large as the budget allows
    for the longest from there on. Within a step, longest first, they are dealt out to the ranks there and back, so
    that all ranks have k samples and nearly the same longest one and sum. The steps come in random order, new in each
    epoch set with `set_epoch`. Every sample comes once, except that up to R - 1 come twice (or, with `drop_last`, not
    at all) so that all ranks have as many batches of the same sizes. Give it to a DataLoader as `batch_sampler`.

    Args:
        lengths: of all samples, in tokens or any measure of cost: N numbers > 0 as a list, array or tensor; see
            `bagua.data.complexities`.
        max_tokens: most that `len(batch) * max(lengths of the batch)` may be on a rank.
        num_replicas, rank: None takes them from `torch.distributed`.
        max_samples: most samples in a batch; None: any number.
        shuffle: False gives the steps from the longest samples to the shortest, the same in each epoch.
        seed: equal on all ranks.
        drop_last: leave samples out rather than repeat some.
        jitter: 0 to 1: lengths are multiplied by a random number from 1 - jitter to 1 before they are sorted, so
            that batches are made up anew in each epoch. More variety, more padding; balance hardly suffers.

    Raises:
        ValueError: a sample is longer than the budget, or an argument is wrong; names it.
        TypeError, RuntimeError: an argument is wrong; names it.

    Examples:
        >>> sampler = bagua.data.TokenBudgetBatchSampler([5, 9, 3, 7], max_tokens=20, jitter=0, shuffle=False)
        >>> list(sampler)
        [[1, 3], [0, 2]]
    """

    def __init__(
        self,
        lengths: Sequence[float] | Tensor | Any,
        max_tokens: float,
        num_replicas: int | None = None,
        rank: int | None = None,
        *,
        max_samples: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        jitter: float = 0.05,
    ) -> None:
        super().__init__()
        self.num_replicas, self.rank = check_share(num_replicas, rank)
        self.shuffle, self.drop_last = check_flag("shuffle", shuffle), check_flag("drop_last", drop_last)
        self.seed = check_seed(seed)
        if not 0 <= jitter < 1:
            raise ValueError(f"jitter: expected 0 or more and less than 1, got {jitter}")
        if max_samples is not None and max_samples < 1:
            raise ValueError(f"max_samples: expected 1 or more, got {max_samples}")
        self.lengths = as_complexities(lengths, "lengths")
        shortest, longest = int(self.lengths.argmin()), int(self.lengths.argmax())
        if self.lengths[shortest] <= 0:
            raise ValueError(
                f"lengths: expected numbers > 0, got {self.lengths[shortest].item()} for sample {shortest}"
            )
        if not max_tokens >= self.lengths[longest]:
            most = self.lengths[longest].item()
            raise ValueError(f"max_tokens: {max_tokens} is less than the length of sample {longest}, {most:g}")
        self.max_tokens, self.max_samples, self.jitter = float(max_tokens), max_samples, float(jitter)
        self._fingerprint = fingerprint(self.lengths)
        self._planned: tuple[int, _Steps] | None = None

    def batches(self, rank: int) -> Sequence[list[int]]:
        """This epoch's batches of a rank."""
        if not 0 <= rank < self.num_replicas:
            raise ValueError(f"rank: expected 0 to {self.num_replicas - 1}, got {rank}")
        return _Share(self._steps(), rank)

    def _items(self) -> Sequence[list[int]]:
        return self.batches(self.rank)

    def _circumstances(self) -> dict[str, Any]:
        return {
            "num_replicas": self.num_replicas,
            "max_tokens": self.max_tokens,
            "max_samples": self.max_samples,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
            "jitter": self.jitter,
            "lengths": self._fingerprint,
        }

    def _steps(self) -> _Steps:
        if self._planned is None or self._planned[0] != self.epoch:
            self._planned = self.epoch, self._plan()
        return self._planned[1]

    def _plan(self) -> _Steps:
        """O(N log N)."""
        generator = torch.Generator().manual_seed(self.seed + self.epoch if self.shuffle else self.seed)
        chosen = self._whole(generator)
        lengths = self.lengths[chosen]
        keys = lengths
        if self.shuffle:
            mixed = torch.randperm(len(chosen), generator=generator, device="cpu")  # equal lengths in random order
            chosen, lengths = chosen[mixed], lengths[mixed]
            keys = lengths * (
                1 - self.jitter * torch.rand(len(lengths), generator=generator, dtype=torch.float64, device="cpu")
            )
        order = keys.argsort(descending=True, stable=True)
        chosen, lengths = chosen[order], lengths[order]
        starts = self._cut(lengths)
        step_of = torch.zeros(len(chosen), dtype=torch.int64, device="cpu")
        step_of[starts[1:]] = 1
        step_of = step_of.cumsum(0)
        # Longest first in each step. One sort: what is added to a step's number is less than one.
        within = (step_of - lengths / (lengths.max() + 1) if len(chosen) else lengths).argsort(stable=True)
        ends = [*starts[1:], len(chosen)]
        bounds = list(zip(starts, ends, strict=True)) if len(chosen) else []
        if self.shuffle:
            bounds = [bounds[at] for at in torch.randperm(len(bounds), generator=generator, device="cpu").tolist()]
        return _Steps(chosen[within], bounds, self.num_replicas)

    def _whole(self, generator: torch.Generator) -> Tensor:
        """All samples, less or plus a few so that the ranks get equal numbers."""
        count, ranks = len(self.lengths), self.num_replicas
        odd = count % ranks
        if not odd:
            return torch.arange(count, device="cpu")
        if self.drop_last:
            left_out = torch.randperm(count, generator=generator, device="cpu")[:odd]
            kept = torch.ones(count, dtype=torch.bool, device="cpu")
            kept[left_out] = False
            return kept.nonzero().squeeze(1)
        again = torch.randperm(count, generator=generator, device="cpu").repeat(-(-ranks // count))[: ranks - odd]
        return torch.cat([torch.arange(count, device="cpu"), again])

    def _cut(self, lengths: Tensor) -> list[int]:
        """Where each step begins."""
        longest = lengths.flip(0).cummax(0).values.flip(0) if len(lengths) else lengths  # from each position on
        fit = (self.max_tokens / longest).floor()
        fit = fit.clamp(min=1, max=float(self.max_samples or 2**53))
        sizes = (fit * self.num_replicas).long().tolist()
        starts, at = [], 0
        while at < len(sizes):
            starts.append(at)
            at += sizes[at]
        return starts


class _Steps:
    """An epoch: samples in an order in which those of a step follow each other, and the steps' bounds."""

    def __init__(self, samples: Tensor, bounds: list[tuple[int, int]], num_replicas: int) -> None:
        self._samples, self._bounds, self._num_replicas = samples, bounds, num_replicas

    def __len__(self) -> int:
        return len(self._bounds)

    def batch(self, step: int, rank: int) -> list[int]:
        """Dealt there and back, beginning with another rank in each step."""
        lo, hi = self._bounds[step]
        rows = self._samples[lo:hi].view(-1, self._num_replicas)
        place = (rank + step) % self._num_replicas
        even, odd = rows[0::2, place].tolist(), rows[1::2, self._num_replicas - 1 - place].tolist()
        batch = even + odd
        batch[0::2], batch[1::2] = even, odd
        return batch


class _Share(Sequence[list[int]]):
    """The batches of one rank, made when asked for."""

    def __init__(self, steps: _Steps, rank: int) -> None:
        self._steps, self._rank = steps, rank

    def __len__(self) -> int:
        return len(self._steps)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[each] for each in range(*at.indices(len(self)))]
        return self._steps.batch(range(len(self))[at], self._rank)

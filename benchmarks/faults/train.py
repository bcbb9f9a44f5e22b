"""A rank under `bagua run --fault-tolerant`."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore

import bagua
from bagua.membership.remote_seat import RemoteSeat
from benchmarks.faults.journal import Journal
from benchmarks.faults.task import Task, parse, state_bytes


def main() -> None:
    """Train until the file `stop` says that it is enough."""
    args = parse()
    journal = Journal(args.folder)
    task = Task(args)
    model, optimizer, seat = task.model, task.optimizer, RemoteSeat()
    journal.ready()
    algorithm = task.configuration.make(10_000)
    bagua.distribute(model, optimizer, algorithm, fault_tolerant=bagua.FaultTolerance(seat=seat))
    now = bagua.stats(model)
    journal.joined(now.steps)
    known = now.membership[-1].epoch if now.membership else 0
    while not task.is_over((now := bagua.stats(model)).steps):
        loss = task.loss(model, task.batch(now.steps, now.rank, now.size))
        during = bagua.stats(model)  # the forward pass may have begun with other groups
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        after = bagua.stats(model)
        for change in after.membership:
            if change.epoch > known:
                known = change.epoch
                journal.write(change=_facts(change), begin=went_on(change, model.began))
                if after.rank == 0:
                    _count_keys(journal, seat)
        journal.step(
            during.steps,
            model.began,
            rank=during.rank,
            size=during.size,
            applied=after.steps > during.steps,
            digest=task.digest(),
        )
        if args.losses_every and after.steps > during.steps and after.steps % args.losses_every == 0:
            journal.write(held_out=_loss_of_mean(task), after=after.steps)
    journal.write(state_bytes=state_bytes(task))
    own = task.held_out_loss()
    bagua.average_parameters(model)
    journal.finished(bagua.stats(model).steps, task.held_out_loss(), own)


def went_on(change: Any, began: float) -> float:
    """Return when training went on, on the clock of `began`: with a step, or within one that repeats its exchange.

    Args:
        began: when the step began that has just ended.
    """
    return max(began, time.monotonic() - (time.time() - change.time))


@torch.no_grad()
def _loss_of_mean(task: Task) -> float:
    """As a user who saves the model would get it. The rank keeps its own weights."""
    params = list(task.model.parameters())
    own = [param.clone() for param in params]
    bagua.average_parameters(task.model)
    loss = task.held_out_loss()
    for param, value in zip(params, own, strict=True):
        param.copy_(value)
    return loss


def _facts(change: Any) -> dict[str, Any]:
    names = ("epoch", "step", "lost", "joined", "reason", "skipped", "stalled_s")
    return {name: getattr(change, name) for name in names}


def _count_keys(journal: Journal, seat: RemoteSeat) -> None:
    """Write down how many keys the store holds in which the groups meet. It may be that of a host just lost."""
    view = seat.view()
    if view is None:
        return

    def count() -> None:
        host, _, port = view.store.rpartition(":")
        try:
            store = TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5)
            )  # fmt: skip
            journal.write(keys=store.num_keys(), store=view.store, epoch=view.epoch, members=len(view.members))
        except (OSError, RuntimeError):
            return

    threading.Thread(target=count, daemon=True).start()


if __name__ == "__main__":
    main()

"""A rank under torchft: the mean of all gradients through its `Manager`, a replica group for each host.

Not through its `DistributedDataParallel`: of version 0.2.0 this ends the survivors with an AssertionError
(`ddp.py`, `_comm_hook`) when an exchange fails because a rank is lost.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torchft  # pyright: ignore[reportMissingImports]

from benchmarks.faults.journal import Journal
from benchmarks.faults.task import Task, parse, state_bytes


def main() -> None:
    """Train until the file `stop` says that it is enough."""
    args = parse()
    journal = Journal(args.folder)
    task = Task(args)
    host, hosts = int(os.environ["BAGUA_LAB_HOST"]), len(os.environ["BAGUA_LAB_HOSTS"].split(","))

    def load(state: dict[str, Any]) -> None:
        task.model.load_state_dict(state["model"])
        task.optimizer.load_state_dict(state["optimizer"])

    journal.ready()
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=10)),
        load_state_dict=load,
        state_dict=lambda: {"model": task.model.state_dict(), "optimizer": task.optimizer.state_dict()},
        min_replica_size=hosts // 2 + 1,
        replica_id=f"host{host}-",
        timeout=timedelta(seconds=10),
        hostname=os.environ["BAGUA_LAB_HOSTS"].split(",")[host],
    )
    optimizer = torchft.Optimizer(manager, task.optimizer)
    joined = False
    while not task.is_over(manager.current_step()):
        optimizer.zero_grad()
        loss = task.loss(task.model, task.batch(manager.current_step(), host, hosts))
        loss.backward()
        _average(manager, task)
        before = manager.current_step()
        optimizer.step()
        after, begin = manager.current_step(), task.model.began
        rank = manager.participating_rank()
        if not joined:
            joined = True
            journal.joined(before)
        journal.step(
            after - 1 if after > before else before,  # one that has fetched the weights was behind
            begin,
            rank=-1 if rank is None else rank,
            size=manager.num_participants(),
            applied=after > before,
            digest=task.digest(),
        )
    journal.write(state_bytes=state_bytes(task))
    journal.finished(manager.current_step(), task.held_out_loss())
    manager.shutdown()


def _average(manager: Any, task: Task) -> None:
    """All gradients as one tensor. If the exchange fails, the manager commits no step."""
    grads = [each.grad for each in task.model.parameters() if each.grad is not None]
    flat = torch.cat([grad.view(-1) for grad in grads])
    manager.allreduce(flat).wait()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


if __name__ == "__main__":
    main()

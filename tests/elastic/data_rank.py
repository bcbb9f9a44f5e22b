"""A rank that trains on the samples of an elastic sampler, and tells which ones each step uses."""

from __future__ import annotations

import itertools
import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import bagua
from bagua import elastic
from bagua.engine.hooks import attachments
from tests.elastic.fault_tolerant_rank import digest, make_model, make_optimizer, open_seat

__all__ = ["DECAY", "GLOBAL_BATCH", "NUM_SAMPLES", "SEED", "STEPS_PER_EPOCH", "train_on_samples"]

NUM_SAMPLES, GLOBAL_BATCH = 52, 8  # four are left for the last step: nobody needs padding
STEPS_PER_EPOCH = 7
SEED = 5
DECAY = 0.99  # of the learning rate, in each step


def train_on_samples(pipe: Connection, job: dict[str, Any]) -> None:
    """Train for an epoch at least after the last change of the members."""
    seat, server = open_seat(pipe, job)
    place = job["place"]
    model = make_model()
    optimizer = make_optimizer(job["algorithm"], model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: DECAY**step)
    tolerance = bagua.FaultTolerance(seat=seat, max_blocked_s=90.0)
    bagua.distribute(model, optimizer, job["algorithm"], fault_tolerant=tolerance, **job["options"])
    recovery = attachments[model].engine.failures.recovery
    assert recovery is not None
    resizes: list[tuple[int, int]] = []
    x = torch.randn(NUM_SAMPLES, 20, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, torch.arange(NUM_SAMPLES))
    sampler = elastic.Sampler(data, seed=SEED, global_batch_size=GLOBAL_BATCH)
    state = elastic.State(
        model, optimizer, sampler, scheduler=scheduler, steps=0, epochs=0,
        on_resize=lambda change: resizes.append((change.old, change.new)),
    )  # fmt: skip
    restored = state.restore()
    pipe.send({"begins": bagua.stats(model).steps, "source": None if restored is None else restored.source})
    loader = DataLoader(data, batch_sampler=sampler, num_workers=job["workers"])
    for epoch in itertools.count(sampler.epoch):
        stats = bagua.stats(model)
        last = stats.membership[-1].step if stats.membership else 0
        # The same on all ranks, at whichever side of an epoch's end they have noticed the last change.
        if len(stats.membership) >= job["changes"][place] and stats.steps >= last + STEPS_PER_EPOCH:
            break
        sampler.set_epoch(epoch)
        for inputs, ids in sampler.track(loader):
            step = bagua.stats(model).steps
            pipe.send(
                {
                    "group": recovery.group, "size": sampler.num_replicas, "step": step, "counter": state.steps,
                    "epoch": epoch, "uses": ids.tolist(), "lr": optimizer.param_groups[0]["lr"],
                }
            )  # fmt: skip
            model(inputs).square().mean().backward()
            if [place, step] == job["fails_at"] and not recovery.changes:
                pipe.send({"holds": step})
                pipe.recv()
                recovery.exchange_failed("a test")
            if [place, step] == job["dies_in_step"]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.steps += 1
            pipe.send({"attempt": state.steps})
            time.sleep(job["pause_s"])
        state.epochs += 1
        state.commit()
    counts = {"steps": bagua.stats(model).steps, "counter": state.steps, "epochs": state.epochs, "number": state.number}
    pipe.send({"ended": place, "digest": digest(model), "resizes": resizes, **counts})
    pipe.recv()
    bagua.detach(model)
    seat.close()
    del server

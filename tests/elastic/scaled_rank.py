"""A rank that trains with a gradient scaler, and tells its scale after each step."""

from __future__ import annotations

import itertools
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

import bagua
from tests.elastic.fault_tolerant_rank import digest, make_model, make_optimizer, open_seat

__all__ = ["GROWTH", "train_scaled"]

GROWTH = 3  # counted steps after which the scale doubles


def train_scaled(pipe: Connection, job: dict[str, Any]) -> None:
    """Train until so many steps count after the last change of the members."""
    seat, server = open_seat(pipe, job)
    place = job["place"]
    model = make_model()
    optimizer = make_optimizer(job["algorithm"], model)
    scaler = bagua.GradScaler("cpu", init_scale=1.0, growth_interval=GROWTH)
    tolerance = bagua.FaultTolerance(seat=seat, max_blocked_s=90.0)
    bagua.distribute(model, optimizer, job["algorithm"], fault_tolerant=tolerance, **job["options"])
    generator = torch.Generator().manual_seed(place)
    for attempt in itertools.count():
        stats = bagua.stats(model)
        last = stats.membership[-1].step if stats.membership else 0
        if len(stats.membership) >= job["changes"][place] and stats.steps >= last + job["steps"]:
            break
        loss = model(torch.randn(8, 20, generator=generator)).square().mean()
        used = scaler.scale(torch.ones(())).item()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pipe.send({"attempt": attempt, "steps": bagua.stats(model).steps, "used": used})
        time.sleep(job["pause_s"])
    pipe.send({"ended": place, "steps": stats.steps, "digest": digest(model), "state": scaler.state_dict()})
    pipe.recv()
    bagua.detach(model)
    seat.close()
    del server

"""One rank of a job whose exchanges take over a second on a slow link; says what ended it."""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch

import bagua

torch.set_num_threads(1)
os.environ.update(RANK=os.environ["NODE_RANK"], WORLD_SIZE=os.environ["NNODES"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
bagua.init_process_group(timeout=timedelta(seconds=float(sys.argv[1])))
model = torch.nn.Sequential(torch.nn.Linear(500, 500), torch.nn.Linear(500, 500))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bagua.distribute(model, optimizer, sys.argv[2], bucket_bytes=1 << 20)
for step in range(1000):
    optimizer.zero_grad()
    started = time.monotonic()
    print(f"step {step} at {started:.1f}", flush=True)
    try:
        model(torch.randn(4, 500)).square().mean().backward()
        optimizer.step()
    except bagua.CommunicationError as error:
        print(f"after {time.monotonic() - started:.1f} s: {error}", flush=True)
        os._exit(7)

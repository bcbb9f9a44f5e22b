"""A rank that trains until its exchanges fail, and writes down why.

python tests/engine/cut_host.py ALGORITHM FOLDER
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

import bagua

TIMEOUT_S = 8.0


def main(algorithm: str, folder: Path) -> None:
    rank = int(os.environ["NODE_RANK"])
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3"}
    bagua.init_process_group(timeout=timedelta(seconds=TIMEOUT_S))
    model = torch.nn.Linear(50, 50)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    bagua.distribute(model, optimizer, algorithm)
    step = 0
    try:
        while True:
            model(torch.randn(4, 50)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step == 5:
                (folder / f"trains{rank}").touch()
            time.sleep(0.02)
    except bagua.CommunicationError as error:
        (folder / f"error{rank}").write_text(str(error))
        raise


main(sys.argv[1], Path(sys.argv[2]))

"""One rank of `faults`: trains on handwritten digits, and ends itself once on the last host. Started by `bagua run`.

python -m bagua run --fault-tolerant --max-restarts 1 benchmarks/gpu/faults_rank.py FOLDER ALGORITHM DEVICE BACKEND
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from importlib import import_module
from pathlib import Path

import torch
from torch.nn import functional as F

import bagua

_EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
_HOST, _AT = 2, 40  # the rank that is lost, and its step then
_MORE = 100  # steps after it came back


def main() -> None:
    """Train until so many steps count."""
    sys.path.insert(0, str(_EXAMPLES))
    digits = import_module("digits")
    folder, algorithm, device = Path(sys.argv[1]), sys.argv[2], torch.device(sys.argv[3])
    host = int(os.environ["BAGUA_LAB_HOST"])
    tolerance = bagua.FaultTolerance(backend=sys.argv[4])
    if tolerance.backend == "nccl":
        os.environ.update(NCCL_HOSTID=f"host{host}", NCCL_IB_DISABLE="1")  # else it refuses to share a GPU
    torch.set_num_threads(1)
    torch.manual_seed(0)
    train, test = digits.load_data()
    images, labels = (each.to(device) for each in train.tensors)
    model = digits.DigitsNet().to(device)
    optimizer = digits.make_optimizer(algorithm, model.parameters(), None, sgd_lr=0.05)
    bagua.distribute(model, optimizer, algorithm, fault_tolerant=tolerance, **digits.make_options(algorithm))
    lost, stop = folder / "lost", folder / "stop"
    if host == _HOST and lost.exists():
        _write(stop, str(bagua.stats(model).steps + _MORE))
    while (now := bagua.stats(model)).steps < (int(stop.read_text()) if stop.exists() else sys.maxsize):
        if host == _HOST and now.steps >= _AT and not lost.exists():
            lost.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(now.steps)
        mine = torch.randperm(len(images), generator=generator)[:48][now.rank :: now.size].to(device)
        F.cross_entropy(model(images[mine]), labels[mine]).backward()
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.02)
    stalls = [[len(each.lost), len(each.joined), round(each.stalled_s, 3)] for each in bagua.stats(model).membership]
    bagua.average_parameters(model)
    found = {"right": digits.accuracy(model, test, device), "changes": stalls}
    _write(folder / f"host-{host}.json", json.dumps(found))


def _write(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(text)
    fresh.rename(path)


if __name__ == "__main__":
    main()

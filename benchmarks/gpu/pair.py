"""Two processes that are two ranks on one GPU: they train, and each says what it ended with."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Skip

__all__ = ["train_two"]

_ROOT = Path(__file__).resolve().parents[2]
_LIMIT_S = 60
_REFUSED = re.compile(r"Duplicate GPU detected.*|ncclInvalidUsage.*|unhandled system error.*")


def train_two(backend: str, plugin: bool) -> dict[str, Any]:
    """Train on both ranks over `backend`; returns what they report.

    Args:
        plugin: have NCCL load Bagua-Net.

    Raises:
        Skip: NCCL refuses two ranks on this GPU.
        AssertionError: a rank failed, or the ranks differ.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            env = {**os.environ, "PYTHONPATH": str(_ROOT), "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            env.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NCCL_HOSTID=f"rank{rank}")
            env.update(NCCL_SOCKET_IFNAME="lo", NCCL_DEBUG="INFO", NCCL_DEBUG_FILE=f"{folder}/nccl{rank}.log")
            env.update(NCCL_IB_DISABLE="1")
            if plugin:
                from bagua.net.plugin import environment

                env.update(environment(env))
            words = [sys.executable, "-m", "benchmarks.gpu.pair", backend]
            ranks.append(subprocess.Popen(words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        outputs = []
        for each in ranks:
            try:
                outputs.append(each.communicate(timeout=_LIMIT_S)[0])
            except subprocess.TimeoutExpired:
                each.kill()
                outputs.append(each.communicate()[0] + f"\nkilled after {_LIMIT_S} s")
        log = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).glob("nccl*.log")))
    text = "\n".join(outputs)
    if any(each.returncode for each in ranks):
        refused = _REFUSED.search(log) or _REFUSED.search(text)
        if backend == "nccl" and refused:
            raise Skip(f"NCCL refuses it: {refused.group()[:200]}")
        raise AssertionError(f"exit codes {[each.returncode for each in ranks]}: {text[-1500:]}\n{log[-1500:]}")
    reports = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
    assert reports[0]["weights"] == reports[1]["weights"], "the ranks' weights differ"
    networks = sorted(
        {line.split("NCCL INFO ")[-1] for line in log.splitlines() if "network" in line or "Plugin" in line}
    )
    return {"reports": reports, "nccl_log": networks[:20]}


def _rank(backend: str) -> None:
    import torch
    from torch import nn

    import bagua

    torch.cuda.set_device(0)
    bagua.init_process_group("cpu:gloo,cuda:nccl" if backend == "nccl" else "gloo")
    torch.manual_seed(0)
    weights = {}
    for algorithm in ("gradient_allreduce", "bytegrad"):
        model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, algorithm, bucket_bytes=1 << 20)
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + int(os.environ["RANK"]))
            optimizer.zero_grad()
            model(torch.randn(32, 512, generator=generator).cuda()).square().mean().backward()
            optimizer.step()
        weights[algorithm] = [float(param.double().sum()) for param in model.parameters()]
        assert bagua.stats(model).total.bytes_sent > 0
        bagua.detach(model)
    bagua.destroy_process_group()
    print(json.dumps({"weights": weights}))


if __name__ == "__main__":
    _rank(sys.argv[1])

"""Part 1: what the machine is and what is installed."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.cuda.nccl
import torch.distributed as dist

from bagua import codecs
from bagua.net.plugin import plugin_path
from benchmarks.gpu.record import Record, Skip

__all__ = ["run"]

_PACKAGES = ("triton", "numpy", "pytest", "pytest-timeout", "pytest-xdist", "hypothesis")


def run(record: Record) -> None:
    """Facts, and whether what the other parts need is there."""
    facts = record.facts
    facts.update(python=platform.python_version(), cpu_cores=os.cpu_count(), torch=torch.__version__)
    facts["cuda"] = torch.version.cuda
    for package in _PACKAGES:
        facts[package] = _version(package)
    with record.check("torch is 2.11 or newer"):
        found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
        assert found >= (2, 11), torch.__version__
    with record.check("a GPU that torch can use"):
        _gpu(record)
    with record.check("NCCL"):
        if not dist.is_nccl_available() or not torch.cuda.is_available():
            raise Skip("this torch was built without NCCL, or has no GPU for it")
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    with record.check("Triton"):
        if importlib.util.find_spec("triton") is None:
            raise Skip("not installed; codecs on CUDA tensors use torch's kernels")
        from bagua.codecs import backends

        kernels, problem = backends._triton()
        assert kernels is not None, problem
    with record.check("compiled CPU kernels"):
        facts["cpu_codecs"] = list(codecs.available_backends())
        if len(facts["cpu_codecs"]) == 1:
            raise Skip("not built: no C++ compiler, or setup.py failed; torch's kernels run on CPU tensors")
    with record.check("Bagua-Net is built"):
        try:
            facts["plugin"] = plugin_path().name
        except RuntimeError as error:
            raise Skip(str(error)) from error


def _gpu(record: Record) -> None:
    if record.dry and not torch.cuda.is_available():
        raise Skip("dry run")
    assert torch.cuda.is_available(), "torch.cuda.is_available() is False"
    found = torch.cuda.get_device_properties(0)
    record.facts.update(
        gpu=found.name,
        gpus=torch.cuda.device_count(),
        compute_capability=f"{found.major}.{found.minor}",
        memory_gib=round(found.total_memory / 2**30, 1),
        multiprocessors=found.multi_processor_count,
    )
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.mem", "--format=csv,noheader"]
    try:
        record.facts["driver"] = subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        record.facts["driver"] = f"unknown: {error}"
    x = torch.ones(1000, device="cuda")
    assert float((x + x).sum()) == 2000.0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

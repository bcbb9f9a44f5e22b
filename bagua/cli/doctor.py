"""`bagua doctor`: check what works on this machine, and whether NCCL would load Bagua-Net."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bagua.net.diagnosis import diagnose
from bagua.net.driver import DriverError, run_here
from bagua.net.plugin import plugin_path

__all__ = ["examine", "main"]

_LIBRARIES = {
    "codecs": "codecs/_native.so",
    "native transport": "comm/_mesh.so",
    "lab": "lab/_relay.so",
    "Bagua-Net": "net/libnccl-net-bagua.so",
    "Bagua-Net driver": "net/_driver.so",
}


def examine() -> dict[str, Any]:
    """Return what there is, as it goes into JSON."""
    import torch

    nccl = _nccl_version()
    verdict = diagnose(nccl, os.environ)
    package = Path(__file__).resolve().parent.parent
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "cuda_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "nccl": ".".join(map(str, nccl)) if nccl else None,
        "codec_backend": _codec_backends(),
        "libraries": {name: (package / file).exists() for name, file in _LIBRARIES.items()},
        "bagua_net": {"would_load": verdict.loads, "reason": verdict.reason, **_plugin_facts()},
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "congestion_control": _read("/proc/sys/net/ipv4/tcp_congestion_control"),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print it.

    Returns:
        0; 1 if the compiled libraries are not all there. With `--cluster`, the result of that check.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--cluster" in words:
        return importlib.import_module("bagua.doctor.main").main(words)
    parser = argparse.ArgumentParser(prog="bagua doctor", description="Check what works on this machine.")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument("--cluster", action="store_true", help="check all hosts of a job instead: --cluster --help")
    args = parser.parse_args(words)
    found = examine()
    if args.json:
        print(json.dumps(found, indent=1))
    else:
        for line in _lines(found):
            print(line)
    return 0 if all(found["libraries"].values()) else 1


def _codec_backends() -> dict[str, str | None]:
    """The kernels that codecs use, by device; None where there is no such device, or what is wrong."""
    import torch

    from bagua.codecs import backend

    found: dict[str, str | None] = {}
    for device, there in (("cpu", True), ("cuda", torch.cuda.is_available())):
        try:
            found[device] = backend(device) if there else None
        except (ValueError, RuntimeError) as error:
            found[device] = f"none: {error}"
    return found


def _nccl_version() -> tuple[int, ...] | None:
    import torch
    import torch.cuda.nccl
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_nccl_available() and torch.cuda.is_available()):
        return None
    return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))


def _plugin_facts() -> dict[str, Any]:
    """What the plugin itself says when it is loaded: interfaces it would use."""
    try:
        env = {name: value for name, value in os.environ.items() if name.startswith(("NCCL_SOCKET", "NCCL_COMM_ID"))}
        ended = run_here(20, mode="facts", env={"NCCL_SOCKET_IFNAME": "", **env})
    except (DriverError, RuntimeError) as error:
        return {"error": str(error)}
    if ended.status or not ended.results:
        return {"error": ended.errors.strip() or f"the driver ended with {ended.status}"}
    return {"path": str(plugin_path()), "interfaces": [device["name"] for device in ended.results[0]["devices"]]}


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None


def _lines(found: dict[str, Any]) -> list[str]:
    built = ", ".join(f"{name}: {'built' if there else 'MISSING'}" for name, there in found["libraries"].items())
    codecs = ", ".join(f"{device} {name}" for device, name in found["codec_backend"].items() if name is not None)
    net = found["bagua_net"]
    versions = f"Python {found['python']}, torch {found['torch']}, NCCL {found['nccl'] or 'none'}"
    lines = [
        f"{versions}; {found['cuda_devices']} CUDA devices",
        f"compiled libraries: {built}",
        f"codec backend: {codecs}",
        f"open files: at most {found['max_open_files']}; TCP congestion control: {found['congestion_control']}",
        f"NCCL would load Bagua-Net: {'yes' if net['would_load'] else 'no'}: {net['reason']}",
    ]
    if "interfaces" in net:
        lines.append(f"Bagua-Net would use: {', '.join(net['interfaces'])}")
    if "error" in net:
        lines.append(f"Bagua-Net does not start: {net['error']}")
    return lines

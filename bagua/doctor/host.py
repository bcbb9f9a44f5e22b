"""What one host has: interfaces, TCP settings, versions, shared memory, cores; as plain data."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import socket
import struct
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl

import bagua
from bagua.codecs import backend
from bagua.engine.startup.link_probe import usable_cores
from bagua.net.diagnosis import diagnose
from bagua.own_address import address_towards, interface_of

__all__ = ["examine_host"]

_SIOCGIFMTU = 0x8921  # linux/sockios.h
_NET = Path("/proc/sys/net")


def examine_host(master: str) -> dict[str, Any]:
    """Return the facts of this host, of which one rank tells the others. What cannot be read is None.

    Args:
        master: address of the host that all hosts reach; the route to it says which interface is used.
    """
    nccl = _nccl_version()
    plugin = diagnose(nccl, os.environ)
    chosen = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    return {
        "host": socket.gethostname(),
        "interface": chosen or _interface_to(master),
        "interface_chosen": bool(chosen),
        "name_is_loopback": _name_is_loopback(),
        "mtu": _mtus(),
        "tcp": {
            "rmem_max": _last(_NET / "core/rmem_max"),
            "wmem_max": _last(_NET / "core/wmem_max"),
            "tcp_rmem_max": _last(_NET / "ipv4/tcp_rmem"),
            "tcp_wmem_max": _last(_NET / "ipv4/tcp_wmem"),
            "congestion_control": _text(_NET / "ipv4/tcp_congestion_control"),
            "slow_start_after_idle": _last(_NET / "ipv4/tcp_slow_start_after_idle"),
        },
        "versions": {
            "Python": platform.python_version(),
            "torch": torch.__version__,
            "bagua": bagua.__version__,
            "NCCL": ".".join(map(str, nccl)) if nccl else None,
            "codec kernels": _codec_kernels(),
        },
        "cuda_devices": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "bagua_net": {"would_load": plugin.loads, "reason": plugin.reason},
        "shm": _shared_memory(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "max_open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _nccl_version() -> tuple[int, ...] | None:
    if not torch.cuda.is_available():
        return None
    return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))


def _codec_kernels() -> str:
    found = []
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        try:
            found.append(f"{device} {backend(device)}")
        except (ValueError, RuntimeError):
            found.append(f"{device} none")
    return ", ".join(found)


def _interface_to(master: str) -> str | None:
    """The interface with the address from which `master` is reached."""
    address = address_towards(master)
    return None if address is None else interface_of(address)


def _name_is_loopback() -> bool:
    """Whether other hosts would be told a loopback address: gloo tells them what the host name resolves to."""
    try:
        return socket.gethostbyname(socket.gethostname()).startswith("127.")
    except OSError:
        return True


def _mtus() -> dict[str, int]:
    """By interface, from the kernel: /sys may show another network namespace."""
    found: dict[str, int] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFMTU, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it is gone
                continue
            found[name] = struct.unpack_from("i", answer, 16)[0]
    return found


def _shared_memory() -> dict[str, int] | None:
    """Bytes of /dev/shm."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return {"size": found.f_frsize * found.f_blocks, "free": found.f_frsize * found.f_bavail}


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def _last(path: Path) -> int | None:
    words = (_text(path) or "").split()
    return int(words[-1]) if words and words[-1].isdigit() else None

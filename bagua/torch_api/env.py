"""Who am I? By the launcher's environment, else by `torch.distributed`, else the only process there is."""

from __future__ import annotations

import os
import socket

import torch.distributed as dist

from bagua.engine.reducer.bucketing import default_bucket_bytes as get_default_bucket_size

__all__ = [
    "find_free_network_port",
    "get_autotune_level",
    "get_autotune_max_samples",
    "get_autotune_sampling_confidence_time_s",
    "get_autotune_server_wait_time",
    "get_autotune_warmup_time_s",
    "get_bagua_service_port",
    "get_default_bucket_size",
    "get_is_output_autotune_log",
    "get_local_rank",
    "get_local_size",
    "get_master_addr",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "is_report_metrics_switch_on",
]


def get_rank() -> int:
    """RANK: my rank among all processes, 0 if alone.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("RANK", dist.get_rank() if dist.is_initialized() else 0)


def get_world_size() -> int:
    """WORLD_SIZE: the number of processes, 1 if alone.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("WORLD_SIZE", dist.get_world_size() if dist.is_initialized() else 1)


def get_local_rank() -> int:
    """LOCAL_RANK: my rank among the processes of this node, 0 by default.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("LOCAL_RANK", 0)


def get_local_size() -> int:
    """LOCAL_WORLD_SIZE: the number of processes on this node, 1 by default.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("LOCAL_WORLD_SIZE", 1)


def get_node_rank() -> int:
    """Number of this node: GROUP_RANK under torchrun, else NODE_RANK, else 0.

    Raises:
        ValueError: the variable is no integer.
    """
    return _number("GROUP_RANK" if _is_elastic_launched() else "NODE_RANK", 0)


def _is_elastic_launched() -> bool:
    """Whether torchrun, or `bagua run`, started this process."""
    return all(name in os.environ for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"))


def get_master_addr() -> str:
    """MASTER_ADDR: host of rank 0, this one by default."""
    return os.environ.get("MASTER_ADDR", "127.0.0.1")


def find_free_network_port() -> int:
    """A TCP port that was free on this host a moment ago."""
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def get_autotune_level() -> int:
    """BAGUA_AUTOTUNE: 1 to tune, 0 (default) not to.

    Raises:
        ValueError: the variable is no integer; so with those below.
    """
    return _number("BAGUA_AUTOTUNE", 0)


def get_autotune_max_samples() -> int:
    """BAGUA_AUTOTUNE_MAX_SAMPLES, 60 by default: settings that are measured at most."""
    return _number("BAGUA_AUTOTUNE_MAX_SAMPLES", 60)


def get_autotune_sampling_confidence_time_s() -> float:
    """BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S, 5 by default: least seconds that one setting is measured."""
    return _seconds("BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S", 5.0)


def get_autotune_warmup_time_s() -> float:
    """BAGUA_AUTOTUNE_WARMUP_TIME_S, 30 by default: seconds before tuning begins."""
    return _seconds("BAGUA_AUTOTUNE_WARMUP_TIME_S", 30.0)


def get_is_output_autotune_log() -> bool:
    """BAGUA_IS_OUTPUT_AUTOTUNE_LOG: whether each measurement is written down; "0" is no, unlike in the original."""
    return os.environ.get("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0") not in ("", "0")


def get_autotune_server_wait_time() -> int:
    """BAGUA_AUTOTUNE_SERVER_WAIT_TIME, 300 by default. Without effect: there is no server."""
    return _number("BAGUA_AUTOTUNE_SERVER_WAIT_TIME", 300)


def get_bagua_service_port() -> int:
    """BAGUA_SERVICE_PORT, -1 by default. Without effect: there is no server."""
    return _number("BAGUA_SERVICE_PORT", -1)


def is_report_metrics_switch_on() -> bool:
    """BAGUA_REPORT_METRICS: whether it is 1. Without effect: there is no server."""
    return _number("BAGUA_REPORT_METRICS", 0) == 1


def _number(name: str, default: int) -> int:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name}: expected an integer in the environment, got {text!r}") from None


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    try:
        return default if text is None else float(text)
    except ValueError:
        raise ValueError(f"{name}: expected a number in the environment, got {text!r}") from None

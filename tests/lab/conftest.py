"""Skips where the machine lacks what the lab needs."""

from __future__ import annotations

import sys

import pytest

from bagua.lab import Cluster, LabError, Link

if sys.platform != "linux":
    pytest.skip("the lab needs Linux", allow_module_level=True)


@pytest.fixture(scope="session")
def namespaces() -> None:
    """For tests that need network namespaces and the compiled relay."""
    try:
        with Cluster(1, mode="namespaces", wire="relay"):
            return
    except LabError as error:
        pytest.skip(f"no cluster on this machine: {error}")


@pytest.fixture(scope="session")
def token_buckets(namespaces: None) -> None:
    """For tests that need the kernel to limit devices."""
    try:
        with Cluster(1, Link("1gbit"), mode="namespaces", wire="tbf"):
            return
    except LabError as error:
        pytest.skip(f"no token buckets on this machine: {error}")

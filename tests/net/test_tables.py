"""The binary interface: five tables, nothing else, and the same bytes through each of them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

import pytest

from bagua.net.driver import run_here
from bagua.net.plugin import plugin_path
from tests.net.table import ENTRIES, MAY_BE_NULL, SIZES, VERSIONS, Table, properties_type


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    # The plugin reads it once in a process: at the first test that loads it here.
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")


def test_exported_symbols() -> None:
    if not shutil.which("nm"):
        pytest.skip("needs nm")
    lines = subprocess.check_output(["nm", "-D", "--defined-only", plugin_path()], text=True, timeout=60).splitlines()
    assert {line.split()[-1] for line in lines} == {f"ncclNetPlugin_v{version}" for version in VERSIONS}


def test_needs_no_cuda_and_no_torch() -> None:
    if not shutil.which("readelf"):
        pytest.skip("needs readelf")
    text = subprocess.check_output(["readelf", "-d", plugin_path()], text=True, timeout=60)
    needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "NEEDED" in line}
    assert {name.split(".so")[0] for name in needed} <= {
        "libc",
        "libm",
        "libpthread",
        "libstdc++",
        "libgcc_s",
        "ld-linux-x86-64",
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_layout(version: int) -> None:
    assert 8 * (len(ENTRIES[version]) + 1) == SIZES[version]
    sizes = {6: 48, 8: 64, 10: 104, 11: 112, 12: 128}
    assert ctypes.sizeof(properties_type(version)) == sizes[version]
    table = Table(version)
    assert table.name == b"Bagua"
    for entry, address in table.addresses.items():
        assert (address is None) == (entry in MAY_BE_NULL), entry


@pytest.mark.parametrize("version", VERSIONS)
def test_a_message_through_each_table(version: int) -> None:
    table = Table(version)
    assert table.init() == 0
    found = table.properties()
    assert found.name == b"lo" and found.ptr_support == 1 and found.max_recvs == 1 and found.speed > 0
    if version >= 10:
        assert (found.num_devices, found.devices[0]) == (1, 0)
        assert found.max_p2p_bytes == 1 << 30 and found.max_coll_bytes == 1 << 29
    if version >= 11:
        assert found.max_multi == 1
    if version >= 12:
        assert (found.rail, found.plane) == (-1, -1)
    listener, send, receive = table.connected()
    sent = ctypes.create_string_buffer(bytes(range(256)) * 1000, 256_000)
    got = ctypes.create_string_buffer(300_000)
    result, first = table.irecv(receive, got, 300_000)
    assert result == 0 and first.value not in (None, 1)
    result, second = table.isend(send, sent, 256_000)
    assert result == 0 and second.value not in (None, 1)
    sizes = table.finish(first, second)
    assert sizes == [[256_000, -7], [256_000, -7]], "one size is written, not more"
    assert got.raw[:256_000] == sent.raw and not any(got.raw[256_000:])
    for entry, comm in (("close_send", send), ("close_recv", receive), ("close_listen", listener)):
        assert table.call(entry, comm) == 0
    if version >= 11:
        assert table.call("finalize", table.context) == 0


def test_bad_arguments() -> None:
    table = Table(12)
    assert table.init() == 0
    properties = properties_type(12)()
    for device in (-1, 1000):
        assert table.call("get_properties", ctypes.c_int(device), ctypes.byref(properties)) == 4
    listener, send, receive = table.connected()
    data = ctypes.create_string_buffer(10)
    result, request = table.isend(send, data, 1 << 33)
    assert result == 4 and not request
    region = ctypes.c_void_p()
    cuda = (send, data, ctypes.c_size_t(10), ctypes.c_int(2), ctypes.byref(region))
    assert table.call("reg_mr", *cuda) == 3, "CUDA memory is not for sockets"
    for entry, comm in (("close_send", send), ("close_recv", receive), ("close_listen", listener)):
        assert table.call(entry, comm) == 0


def test_a_full_connection_refuses() -> None:
    """isend with 32 messages under way gives no request and no error, and takes one again later."""
    table = Table(8)
    assert table.init() == 0
    listener, send, receive = table.connected()
    data = ctypes.create_string_buffer(1000)
    requests = []
    for _ in range(32):
        result, request = table.irecv(receive, data, 1000)
        assert result == 0 and request
        requests.append(request)
    result, refused = table.irecv(receive, data, 1000)
    assert result == 0 and not refused
    result, first = table.isend(send, data, 10)
    table.finish(first, requests[0])
    result, request = table.irecv(receive, data, 1000)
    assert result == 0 and request
    for entry, comm in (("close_send", send), ("close_recv", receive), ("close_listen", listener)):
        assert table.call(entry, comm) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_the_driver_uses_each_table(version: int) -> None:
    ended = run_here(mode="fuzz", table=version, messages=30, seed=version)
    assert ended.status == 0, (ended.results, ended.errors)
    assert ended.results[-1]["messages"] == 30

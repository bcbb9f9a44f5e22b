"""The plugin's tables once more, from Python: positions and prototypes, written down apart from the C++ header."""

from __future__ import annotations

import ctypes
import time
from ctypes import byref, c_char_p, c_float, c_int, c_int16, c_size_t, c_uint64, c_void_p
from typing import Any

from bagua.net.plugin import plugin_path

VERSIONS = (6, 8, 10, 11, 12)
SIZES = {6: 136, 8: 152, 10: 160, 11: 176, 12: 176}
_V6 = ["init", "devices", "get_properties", "listen", "connect", "accept", "reg_mr", "reg_mr_dmabuf", "dereg_mr"]
_V6 += ["isend", "irecv", "iflush", "test", "close_send", "close_recv", "close_listen"]
ENTRIES = {
    6: _V6,
    8: [*_V6, "get_device_mr", "irecv_consumed"],
    10: [*_V6, "get_device_mr", "irecv_consumed", "make_v_device"],
    11: [*_V6, "get_device_mr", "irecv_consumed", "make_v_device", "finalize", "set_net_attr"],
    12: [*_V6, "get_device_mr", "irecv_consumed", "make_v_device", "finalize", "set_net_attr"],
}
MAY_BE_NULL = {"reg_mr_dmabuf", "get_device_mr", "irecv_consumed", "make_v_device", "set_net_attr"}


def properties_type(version: int) -> type[ctypes.Structure]:
    """The properties of one version."""
    head = [("name", c_char_p), ("pci_path", c_char_p), ("guid", c_uint64), ("ptr_support", c_int)]
    tail = [("speed", c_int), ("port", c_int), ("latency", c_float), ("max_comms", c_int), ("max_recvs", c_int)]
    fields: list[tuple[str, Any]] = list(head)
    fields += [("reg_is_global", c_int)] if version >= 8 else []
    fields += [("force_flush", c_int)] if version >= 10 else []
    fields += tail
    fields += [("device_type", c_int), ("device_version", c_int)] if version >= 8 else []
    if version >= 10:
        fields += [("num_devices", c_int), ("devices", c_int * (8 if version >= 12 else 4))]
        fields += [("max_p2p_bytes", c_size_t), ("max_coll_bytes", c_size_t)]
    fields += [("max_multi", c_int)] if version >= 11 else []
    fields += [("rail", c_int16), ("plane", c_int16)] if version >= 12 else []
    return type(f"Properties{version}", (ctypes.Structure,), {"_fields_": fields})


class Table:
    """One version's table, called through its own prototypes."""

    def __init__(self, version: int) -> None:
        self.version = version
        library = ctypes.CDLL(str(plugin_path()))
        words = (c_void_p * (len(ENTRIES[version]) + 1)).in_dll(library, f"ncclNetPlugin_v{version}")
        self.name = c_char_p(words[0]).value
        self.addresses = dict(zip(ENTRIES[version], words[1:], strict=True))
        self.context = c_void_p()

    def call(self, entry: str, *arguments: Any) -> int:
        """Calls an entry; arguments are ctypes objects of the right types."""
        types = [type(argument) if not isinstance(argument, _BYREF) else c_void_p for argument in arguments]
        address = self.addresses[entry]
        assert address is not None
        return ctypes.CFUNCTYPE(c_int, *types)(address)(*arguments)

    def init(self) -> int:
        none = c_void_p()
        if self.version >= 11:
            return self.call("init", byref(self.context), c_uint64(3), byref(c_int(-1)), none, none)
        return self.call("init", none, none) if self.version == 10 else self.call("init", none)

    def properties(self, device: int = 0) -> ctypes.Structure:
        out = properties_type(self.version)()
        assert self.call("get_properties", c_int(device), byref(out)) == 0
        return out

    def listen(self, handle: ctypes.Array[Any]) -> c_void_p:
        out = c_void_p()
        first = [self.context] if self.version >= 11 else []
        assert self.call("listen", *first, c_int(0), handle, byref(out)) == 0
        return out

    def connect(self, handle: ctypes.Array[Any], out: c_void_p) -> int:
        offload = c_void_p()
        if self.version >= 11:
            return self.call("connect", self.context, c_int(0), handle, byref(out), byref(offload))
        if self.version == 10:
            return self.call("connect", c_int(0), byref(c_int(-1)), handle, byref(out), byref(offload))
        last = [byref(offload)] if self.version == 8 else []
        return self.call("connect", c_int(0), handle, byref(out), *last)

    def accept(self, listener: c_void_p, out: c_void_p) -> int:
        last = [byref(c_void_p())] if self.version >= 8 else []
        return self.call("accept", listener, byref(out), *last)

    def connected(self) -> tuple[c_void_p, c_void_p, c_void_p]:
        """(listener, sending side, receiving side), all in this process."""
        handle = (ctypes.c_char * 128)()
        listener, send, receive = self.listen(handle), c_void_p(), c_void_p()
        until = time.monotonic() + 60
        while not (send and receive):
            assert time.monotonic() < until
            if not send:
                assert self.connect(handle, send) == 0
            if not receive:
                assert self.accept(listener, receive) == 0
        return listener, send, receive

    def isend(self, comm: c_void_p, data: Any, size: int) -> tuple[int, c_void_p]:
        request, none = c_void_p(1), c_void_p()
        wide = c_size_t(size) if self.version >= 10 else c_int(size)
        parents = [none] if self.version >= 10 else []
        return self.call(
            "isend", comm, c_void_p(ctypes.addressof(data)), wide, c_int(9), none, *parents, byref(request)
        ), request

    def irecv(self, comm: c_void_p, data: Any, size: int) -> tuple[int, c_void_p]:
        request = c_void_p(1)  # a hint that NCCL may leave there
        sizes = (c_size_t if self.version >= 10 else c_int)(size)
        where, tag, region = c_void_p(ctypes.addressof(data)), c_int(9), c_void_p()
        parents = [byref(c_void_p())] if self.version >= 10 else []
        arguments = [comm, c_int(1), byref(where), byref(sizes), byref(tag), byref(region), *parents, byref(request)]
        return self.call("irecv", *arguments), request

    def test(self, request: c_void_p) -> tuple[int, bool, list[int]]:
        done, sizes = c_int(0), (c_int * 2)(-7, -7)
        result = self.call("test", request, byref(done), sizes)
        return result, bool(done.value), list(sizes)

    def finish(self, *requests: c_void_p, timeout_s: float = 10) -> list[list[int]]:
        """Tests until all are done; what each wrote as sizes."""
        left, sizes = dict(enumerate(requests)), [[0, 0] for _ in requests]
        until = time.monotonic() + timeout_s
        while left:
            assert time.monotonic() < until
            for index, request in list(left.items()):
                result, done, sizes[index] = self.test(request)
                assert result == 0
                if done:
                    del left[index]
        return sizes


_BYREF = type(byref(c_int()))

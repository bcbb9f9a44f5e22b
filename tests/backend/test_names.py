"""Names and options of the backend, and how torch comes to know them."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

import bagua
from bagua import codecs, registration
from bagua.backend import Backend
from bagua.codecs import Int4, MinMaxUInt8
from bagua.comm.shutdown import carries_nccl

ROOT = Path(__file__).parents[2]


def test_every_codec_has_a_name() -> None:
    assert set(registration.CODECS) == {"uint8", *codecs.available(builtin_only=True)}
    assert set(registration.NAMES) <= set(dist.Backend.backend_list)
    for name in registration.NAMES:
        words = name.replace("_", ":", 1).split(":") if name.startswith("bagua_") else name.split(":")
        long = {"uint8": "minmax_uint8"}
        wanted = words[1] if len(words) > 1 else "uint8"
        assert Backend.parse(name).codec == codecs.get(long.get(wanted, wanted))


def test_entry_points() -> None:
    """torch 2.14 and newer load the one of the name and call it. A colon in such a name is not recommended."""
    section = (ROOT / "pyproject.toml").read_text().split('[project.entry-points."torch.distributed.backends"]')[1]
    rows = dict(re.findall(r'^(\w+) = "([\w.:]+)"$', section.split("\n[")[0], re.MULTILINE))
    names = [name for name in registration.NAMES if ":" not in name]
    assert rows == dict.fromkeys(names, "bagua.registration:register")
    before = list(dist.Backend.backend_list)
    registration.register()
    assert dist.Backend.backend_list == before


def test_options_make_the_name() -> None:
    backend = bagua.Backend("int4", min_bytes=4096, block=256)
    assert backend == "bagua:int4:block=256:min_bytes=4096"
    assert backend == bagua.Backend(Int4(block=256), min_bytes=4096) == Backend.parse(str(backend))
    assert (backend.codec, backend.min_bytes) == (Int4(block=256), 4096)
    assert backend in dist.Backend.backend_list
    assert bagua.Backend() == "bagua:uint8" and bagua.Backend().codec == MinMaxUInt8()
    assert Backend.parse(backend) is backend
    assert Backend.parse("bagua_fp16:min_bytes=0").min_bytes == 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bagua.Backend("unit8"), "codec 'unit8' is unknown; available: identity"),
        (lambda: bagua.Backend("int4", blok=3), "codec 'int4' has no option 'blok'; it has: block"),
        (lambda: bagua.Backend("int4", block="x"), "codec 'int4', option 'block': expected an int, got 'x'"),
        (lambda: bagua.Backend(Int4(), block=64), "Backend: options block go into Int4(block=128), not beside it"),
        (lambda: bagua.Backend(min_bytes=-1), "min_bytes: expected a number of bytes, 0 or more, got -1"),
        (lambda: bagua.Backend(min_bytes=True), "min_bytes: expected a number of bytes, 0 or more, got True"),
        (
            lambda: Backend.parse("bagua:int4:block"),
            "backend 'bagua:int4:block': expected OPTION=VALUE after the codec",
        ),
        (lambda: Backend.parse("bagua:int4:block=64:block=32"), "'block' is given twice"),
        (lambda: Backend.parse("bagua:int4:min_bytes=x"), "min_bytes: expected a number of bytes, 0 or more, got 'x'"),
        (lambda: Backend.parse("bagua:"), "backend: expected bagua, bagua:CODEC or bagua:CODEC:OPTION=VALUE"),
        (lambda: Backend.parse("gloo"), "backend: expected bagua, bagua:CODEC or bagua:CODEC:OPTION=VALUE, got 'gloo'"),
        (lambda: Backend.parse("bagua:unit8"), "codec 'unit8' is unknown"),
    ],
)
def test_wrong_names_and_options(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make()


def test_not_a_codec() -> None:
    with pytest.raises(TypeError, match="codec: expected a name or a Codec, got int"):
        bagua.Backend(8)  # type: ignore[arg-type]


def test_two_codecs_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class Shouting(Int4):
        mark: str = "a"

    bagua.Backend(Shouting(mark="B"))
    with pytest.raises(ValueError, match="would both be called .bagua:int4:mark='b'"):
        bagua.Backend(Shouting(mark="b"))


@pytest.mark.parametrize("name", ["bagua:unit8", "bagua_unit8", "BAGUA:unit8", "bagua:int4:block=64"])
def test_a_name_that_was_never_made(name: str) -> None:
    with pytest.raises(ValueError, match=f"backend: '{name}' is unknown; known are bagua, bagua:uint8, bagua:bf16"):
        bagua.init_process_group(name)
    assert not dist.is_initialized()


def test_nccl_is_found_behind_the_name() -> None:
    def group(**names: str) -> Any:
        return SimpleNamespace(
            _device_types=list(names), _get_backend=lambda device: SimpleNamespace(name=lambda: names[device])
        )

    for name in ("nccl", "nccl2", "nccl-legacy", "NCCL-lazy"):  # the last three: torch 2.15
        assert carries_nccl(group(cpu="gloo", cuda=name))
    assert not carries_nccl(group(cpu="gloo", cuda="gloo"))


def test_options_that_are_not_nccls_are_refused() -> None:
    options: Any = object()
    with pytest.raises(TypeError, match="pg_options: backend 'bagua' takes options of NCCL on GPUs only, got object"):
        dist.init_process_group("bagua", store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    assert not dist.is_initialized()


BEFORE = """
import sys
import bagua
assert "torch" not in sys.modules
finders = len(sys.meta_path)
import torch
assert "bagua:int4" in torch.distributed.Backend.backend_list
assert len(sys.meta_path) < finders + 1 and not any("bagua" in type(finder).__module__ for finder in sys.meta_path)
assert "bagua.backend" not in sys.modules, "a name needs no more than a name"
import inspect
assert "class Backend" in inspect.getsource(torch.distributed.distributed_c10d)
torch.distributed.init_process_group("bagua:eden", store=torch.distributed.HashStore(), rank=0, world_size=1)
x = torch.ones(100_000)
torch.distributed.all_reduce(x)
assert x.sum() == 100_000
torch.distributed.destroy_process_group()
"""
AFTER = """
import sys
import torch
import bagua
assert "bagua" in torch.distributed.Backend.backend_list
assert "bagua.backend" not in sys.modules
"""
WITHOUT = """
import sys, types
module = types.ModuleType("torch.distributed.distributed_c10d")
module.Backend = None
sys.modules["torch.distributed.distributed_c10d"] = module
import bagua
"""


@pytest.mark.process
@pytest.mark.parametrize("script", [BEFORE, AFTER], ids=["bagua first", "torch first"])
def test_importing_bagua_registers(script: str) -> None:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.process
def test_a_torch_that_refuses_the_names_can_be_used() -> None:
    result = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0
    assert "torch does not take the backend 'bagua'" in result.stderr

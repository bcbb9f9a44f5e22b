"""The choice of kernels, the registry, and the shared library itself."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from bagua import codecs
from bagua.codecs import Codec, Identity, MinMaxUInt8, backends, native, registry


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """As in a process that has not used a codec yet."""
    monkeypatch.delenv(backends.ENV, raising=False)
    monkeypatch.setattr(backends, "_default", None)
    native.native_backends.cache_clear()
    yield monkeypatch
    native.native_backends.cache_clear()


@pytest.fixture
def without_library(fresh: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """As after an installation without a compiler."""
    fresh.setattr(native, "LIBRARY", tmp_path / "_native.so")
    return fresh


def test_the_fastest_backend_is_chosen(fresh):
    assert codecs.backend() == codecs.available_backends()[-1]
    assert codecs.available_backends()[0] == "torch"


@pytest.mark.parametrize("name", codecs.available_backends())
def test_the_environment_forces_a_backend(fresh, name: str):
    fresh.setenv(backends.ENV, name)
    assert codecs.backend() == name


def test_unknown_and_impossible_backends(fresh, without_library):
    without_library.setenv(backends.ENV, "cuda")
    with pytest.raises(ValueError, match=r"BAGUA_CODEC_BACKEND: unknown codec backend 'cuda'; known: torch"):
        codecs.backend()
    for name in ("native", "native-avx2"):
        without_library.setenv(backends.ENV, name)
        with pytest.raises(RuntimeError, match=rf"'{name}' cannot run here \(_native.so was not built\)"):
            MinMaxUInt8().encode(torch.ones((1, 4)))


def test_a_missing_library_warns_once_and_at_first_use(without_library, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, logger="bagua"):
        Identity().encode(torch.ones((1, 4)))
        assert not caplog.records
        for _ in range(3):
            MinMaxUInt8().encode(torch.ones((1, 4)))
    assert codecs.backend() == "torch"
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.name == "bagua"
    assert "install g++ and reinstall" in record.getMessage()


@pytest.mark.parametrize("content", [b"", b"not a library"])
def test_a_broken_library_is_as_good_as_none(without_library, tmp_path: Path, content: bytes, caplog):
    (tmp_path / "_native.so").write_bytes(content)
    assert codecs.backend() == "torch"
    assert "cannot be loaded" in caplog.text


def test_a_library_of_another_version_is_not_used(fresh, caplog):
    if codecs.available_backends() == ("torch",):
        pytest.skip("no compiled library in this installation")
    fresh.setattr(native, "_ABI", -1)
    native.native_backends.cache_clear()
    assert codecs.backend() == "torch"
    assert "another version" in caplog.text


def test_use_backend_restores(fresh):
    before = codecs.backend()
    with codecs.use_backend("torch"):
        assert codecs.backend() == "torch"
    assert codecs.backend() == before
    with pytest.raises(ValueError, match="unknown codec backend"):
        with codecs.use_backend("fast"):
            raise AssertionError("not reached")


def test_blocks_of_threads_that_overlap_leave_nothing_behind(fresh):
    before = codecs.backend()
    entered, leave = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    seen: list[str] = ["", ""]

    def block(number: int, name: str) -> None:
        with codecs.use_backend(name):
            entered[number].set()
            leave[number].wait(60)
            seen[number] = codecs.backend()

    names = "torch", codecs.available_backends()[-1]
    threads = [threading.Thread(target=block, args=(number, name)) for number, name in enumerate(names)]
    for number in range(2):
        threads[number].start()
        assert entered[number].wait(60)
        assert codecs.backend() == names[number], "a thread in no block uses the one that was entered last"
    for number in range(2):
        leave[number].set()
        threads[number].join(60)
    assert tuple(seen) == names
    assert codecs.backend() == before


@pytest.mark.process
def test_importing_loads_no_library():
    script = (
        "import logging, sys; logging.basicConfig(level=0); import bagua.codecs as c; "
        "assert c.backends._default is None and c.native.native_backends.cache_info().currsize == 0; "
        "import torch; assert not hasattr(torch.ops.bagua, 'sign_encode'), 'operators are defined on request'"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "bagua" not in done.stderr


@pytest.mark.process
def test_the_library_has_no_weak_symbols():
    if not native.LIBRARY.exists() or not shutil.which("nm"):
        pytest.skip("needs the compiled library and nm")
    listing = subprocess.run(["nm", str(native.LIBRARY)], capture_output=True, text=True, check=True).stdout
    ours = [line.split() for line in listing.splitlines() if len(line.split()) == 3]
    weak = [name for _, kind, name in ours if kind in "VWu" and "bagua" in name]
    assert not weak, "one ISA's code could be used for another's"
    exported = {name.lstrip("_") for _, kind, name in ours if kind == "T" and "bagua" in name}
    for name in ("minmax_uint8_encode", "int4_decode", "sign_decode_mean", "mean_float16"):
        assert f"bagua_{name}_baseline" in exported
    shared = [name for _, kind, name in ours if kind in "VW" and name.startswith("_Z")]
    assert not shared


def test_get_by_name_and_by_instance():
    known = {"bf16", "fp16", "identity", "int4", "minmax_uint8", "sign", "top_k"}
    assert known <= set(codecs.available(builtin_only=True)) <= set(codecs.available())
    assert list(codecs.available()) == sorted(codecs.available())
    for name in codecs.available():
        assert codecs.get(name).name == name
    assert codecs.get("minmax_uint8", block=512) == MinMaxUInt8(block=512)
    instance = MinMaxUInt8(block=7)
    assert codecs.get(instance) is instance


def test_get_says_what_is_known():
    with pytest.raises(
        ValueError,
        match=r"codec 'int2' is unknown; did you mean 'int4'\? available: identity, bf16, fp16, minmax_uint8, int4",
    ):
        codecs.get("int2")
    with pytest.raises(TypeError, match="codec: expected a name or a Codec, got int"):
        codecs.get(8)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"'bf16'.*block"):
        codecs.get("bf16", block=3)
    with pytest.raises(ValueError, match="codec: got an instance and options block; pass the options to Identity"):
        codecs.get(Identity(), block=3)


def test_register(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))

    @codecs.register
    class Mine(Identity):
        name = "mine"

    try:
        assert isinstance(codecs.get("mine"), Mine) and "mine" in codecs.available()
    finally:
        registry.registry.unregister("mine")
    with pytest.warns(FutureWarning, match="register a class"):
        codecs.register("yours", lambda: Identity())
    assert codecs.get("yours") == Identity() and "yours" in codecs.available()
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="codec 'yours' is already registered"):
        codecs.register("yours", Identity)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="non-empty name"):
        codecs.register("", Identity)


def test_a_codec_needs_only_three_methods():
    class Negative(Codec):
        name, linear, lossless = "negative", False, True

        def wire_bytes(self, n: int, dtype: torch.dtype = torch.float32) -> int:
            return 4 * n

        def _encode(self, x_RN: torch.Tensor, wire_RW: torch.Tensor) -> None:
            wire_RW.view(torch.float32).copy_(-x_RN)

        def _decode(self, wire_RW: torch.Tensor, out_RN: torch.Tensor) -> None:
            out_RN.copy_(-wire_RW.view(torch.float32))

    x = torch.arange(6.0).view(2, 3)
    codec = Negative()
    assert torch.equal(codec.decode(codec.encode(x), 3), x)
    assert torch.equal(codec.decode_mean(codec.encode(x), 3, torch.empty(3), 0.5), x.mean(0))

"""Plugin and driver built with AddressSanitizer and with ThreadSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bagua.net.driver import DriverError, run_here
from tests.net.peer import call, greeting, receiver
from tests.net.test_strangers import NONSENSE

CSRC = Path(__file__).parents[2] / "bagua/net/csrc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs g++"),
    pytest.mark.skipif(not CSRC.exists(), reason="needs a source checkout"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module", params=["address,undefined", "thread"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(sanitizer, driver, plugin)."""
    folder = tmp_path_factory.mktemp("built")
    flags = ["-std=c++17", "-O1", "-g", "-fPIC", "-fvisibility=hidden", f"-fsanitize={request.param}"]
    flags += ["-fno-sanitize-recover=all"]

    def compile_unit(source: Path) -> Path:
        made = folder / f"{source.parent.name}-{source.stem}.o"
        extra = ["-DBAGUA_NET_DRIVER_PROGRAM"] if source.parent.name == "driver" else ["-fno-exceptions"]
        subprocess.run(["g++", *flags, *extra, "-c", source, "-o", made], check=True, timeout=300)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        plugin = list(pool.map(compile_unit, sorted(CSRC.glob("*.cpp"))))
        driver = list(pool.map(compile_unit, sorted((CSRC / "driver").glob("*.cpp"))))
    library, program = folder / "libnccl-net-bagua.so", folder / "drive"
    version_script = f"-Wl,--version-script={CSRC / 'exports.map'}"
    subprocess.run(["g++", *flags, "-shared", version_script, *plugin, "-o", library], check=True, timeout=300)
    count = next(path for path in plugin if path.stem.endswith("flow_count"))
    subprocess.run(["g++", *flags, *driver, count, "-o", program, "-ldl", "-pthread"], check=True, timeout=300)
    return request.param, program, library


def drive(built: tuple[str, Path, Path], env: dict[str, str] | None = None, **options: object) -> dict[str, object]:
    _, program, library = built
    ended = run_here(500, program=program, plugin=library, env=env, **options)
    assert ended.status == 0, (ended.results, ended.errors)
    assert "Sanitizer" not in ended.errors and "runtime error" not in ended.errors, ended.errors
    return ended.results[-1]


@pytest.mark.parametrize("flows", [1, 2, 8, 32])
def test_fuzz(built: tuple[str, Path, Path], flows: int) -> None:
    env = {"BAGUA_NET_ADAPT": "0", "BAGUA_NET_FLOWS": str(flows)}
    found = drive(built, env, mode="fuzz", messages=250, channels=2, seed=flows, timeout_seconds=60)
    assert found["messages"] == 500


def test_fuzz_with_adaptive_flows(built: tuple[str, Path, Path]) -> None:
    assert drive(built, mode="fuzz", messages=250, channels=4, timeout_seconds=60)["messages"] == 1000


def test_cycles(built: tuple[str, Path, Path]) -> None:
    found = drive(built, mode="cycles", rounds=100, bytes=100_000, timeout_seconds=60)
    fds = found["fds"]
    assert isinstance(fds, list) and fds[0] == fds[1]


def test_nonsense(built: tuple[str, Path, Path]) -> None:
    _, program, library = built
    for what, said in NONSENSE.items():
        process, handle, _ = receiver(warmup_seconds=30, program=program, plugin=library)
        with call(handle) as connection:
            connection.sendall(greeting(handle) + said)
            try:
                ended = process.wait(60)
            except DriverError as error:
                pytest.fail(f"{what}: {error}")
        assert ended.status == 3 and ended.results[-1]["result"] == 6, (what, ended)
        assert "Sanitizer" not in ended.errors, ended.errors

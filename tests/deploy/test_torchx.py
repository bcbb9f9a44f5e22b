"""The component for TorchX: what it starts, by a stand-in for torchx.specs and, where it is installed, by TorchX."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.deploy.files import DEPLOY, check_command, output

COMPONENT = DEPLOY / "torchx_component.py"


@pytest.fixture
def component(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The component, with records in place of TorchX's classes."""
    specs = SimpleNamespace(
        macros=SimpleNamespace(app_id="${app_id}", rank0_env="${rank0_env}"),
        AppDef=SimpleNamespace,
        Role=SimpleNamespace,
        resource=lambda **given: given,
    )
    stand_in: Any = ModuleType("torchx")
    stand_in.specs = specs
    monkeypatch.setitem(sys.modules, "torchx", stand_in)
    spec = importlib.util.spec_from_file_location("torchx_component", COMPONENT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.bagua


def command(role: Any) -> list[str]:
    """What the shell runs on the first machine, after TorchX has replaced its macros."""
    assert (role.entrypoint, role.args[0]) == ("bash", "-c")
    line = role.args[1].replace("${app_id}", "job-7").replace("${rank0_env}", "FIRST").replace("$$", "$")
    assert '"${FIRST:=localhost}:29500"' in line
    return shlex.split(line.replace("${FIRST:=localhost}", "10.0.0.1"))


def test_each_machine_starts_the_launcher(component: Any) -> None:
    (role,) = component("--algorithm", "bytegrad", script="examples/digits.py", j="2x4", gpu=4).roles
    args = check_command(command(role))
    assert (args.nnodes, args.nproc_per_node, args.rdzv_backend) == ("2", "4", "c10d")
    assert (args.rdzv_id, args.rdzv_endpoint) == ("job-7", "10.0.0.1:29500")
    assert (role.num_replicas, role.min_replicas, role.resource["gpu"]) == (2, 2, 4)


def test_a_range_of_machines_is_elastic(component: Any) -> None:
    (role,) = component("--epochs", "9", script="examples/elastic_digits.py", j="2:4x1", max_restarts=3).roles
    args = check_command(command(role))
    assert (args.nnodes, args.max_restarts, role.num_replicas, role.min_replicas) == ("2:4", 3, 4, 2)


def test_arguments_of_the_script_are_quoted(component: Any) -> None:
    (role,) = component("--name", "two words; $HOME", script="train.py", j="3").roles
    assert command(role)[-3:] == ["train.py", "--name", "two words; $HOME"]
    assert (role.num_replicas, role.min_replicas) == (1, 1)


@pytest.mark.parametrize("j", ["", "2x", "x", "ax2", "2:x4", "2x4x1"])
def test_a_malformed_number_of_machines_is_refused(j: str, component: Any) -> None:
    with pytest.raises(ValueError, match="^j: expected MACHINESxRANKS"):
        component(script="train.py", j=j)


@pytest.mark.process
def test_torchx_takes_the_component() -> None:
    pytest.importorskip("torchx", reason="`make test-deploy` has it")
    torchx = shutil.which("torchx", path=str(Path(sys.executable).parent))
    assert torchx is not None
    component = f"{COMPONENT}:bagua"
    for scheduler in ("local_cwd", "slurm"):
        # TorchX checks the component as it reads it, and shows what it would submit.
        shown = output(torchx, "run", "--dryrun", "-s", scheduler, component, "-j", "2x2", "--script", "train.py")
        assert "bagua run --nnodes 2 --nproc-per-node 2" in shown

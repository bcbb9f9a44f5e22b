"""The workflows: what they name exists, and the versions that they test are those that the package claims."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")
ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yml")}
PROJECT = (ROOT / "pyproject.toml").read_text()


def commands() -> str:
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    return "\n".join(step["run"] for step in steps if "run" in step)


def test_targets_and_folders_of_the_commands_exist() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    used = set(re.findall(r"\bmake ([a-z-]+)", commands()))
    assert used <= set(targets) and {"test", "lint", "docs", "dist-check", "test-deploy", "test-interop"} <= used
    folders = re.findall(r"-m pytest (?:-q )?(\S+)", commands())
    assert folders and all((ROOT / folder).is_dir() for folder in folders)


def test_every_job_has_an_end_and_least_rights() -> None:
    for name, flow in WORKFLOWS.items():
        assert flow["permissions"] == {"contents": "read"}, name
        for title, job in flow["jobs"].items():
            assert job.get("timeout-minutes") or title == "publish", f"{name}: {title}"


def test_the_matrix_has_the_versions_that_the_package_claims() -> None:
    matrix = WORKFLOWS["ci"]["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == re.findall(r'"Programming Language :: Python :: (3\.\d+)"', PROJECT)
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints-dev.txt").read_text(), re.M)
    (oldest,) = re.findall(r'^dependencies = \["torch>=([\d.]+)"\]$', PROJECT, re.M)
    assert matrix["torch"] == [pinned]
    assert [entry["torch"] for entry in matrix["include"]] == [f"{oldest}.0"]
    assert "newest-torch" in WORKFLOWS["ci"]["jobs"]


def test_wheels_are_built_in_the_images_that_an_index_takes() -> None:
    wheels = WORKFLOWS["release"]["jobs"]["wheels"]
    assert wheels["strategy"]["matrix"]["os"] == ["ubuntu-24.04", "ubuntu-24.04-arm"]
    settings = PROJECT.split("[tool.cibuildwheel]")[1]
    for machine in ("x86_64", "aarch64"):
        assert f'manylinux-{machine}-image = "manylinux_2_28"' in settings
    assert WORKFLOWS["release"]["jobs"]["publish"]["needs"] == ["sdist", "wheels"]

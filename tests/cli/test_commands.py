"""`bagua ...`: what a command imports, prints and does at a Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import bagua.codecs
from bagua.cli.main import main
from bagua.distributed import start
from bagua.distributed.run import get_args_parser
from bagua.signals import end_by_exception

ROOT = Path(__file__).resolve().parents[2]

LIGHT = """
import sys
from bagua.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"torch", "numpy"} & set(sys.modules)
assert not heavy, heavy
"""


@pytest.mark.process
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["no-such-command"], ["lab", "run", "--help"]], ids=str)
def test_what_needs_no_torch_imports_none(words: list[str]) -> None:
    subprocess.run([sys.executable, "-c", LIGHT, *words], cwd=ROOT, check=True, capture_output=True, timeout=60)


@pytest.mark.process
def test_doctor_prints_the_codec_backend(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["doctor"]) in (0, 1)
    assert f"codec backend: cpu {bagua.codecs.backend('cpu')}" in capsys.readouterr().out
    monkeypatch.setenv("BAGUA_CODEC_BACKEND", "no-such")
    monkeypatch.setattr("bagua.codecs.backends._default", None)
    assert main(["doctor", "--json"]) in (0, 1)
    assert "BAGUA_CODEC_BACKEND" in json.loads(capsys.readouterr().out)["codec_backend"]["cpu"]


@pytest.mark.process
def test_the_command_of_a_checkout_that_is_not_installed() -> None:
    words = [sys.executable, "-m", "bagua", "--version"]
    assert subprocess.run(words, capture_output=True, text=True, timeout=60).stdout.startswith("bagua ")


def test_a_command_does_not_show_torchs_warning_about_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only that one warning is silenced, and only while no rule of the user's says otherwise."""

    def warn(argv: list[str]) -> int:
        warnings.warn("Failed to initialize NumPy: No module named 'numpy'", UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", UserWarning, stacklevel=1)
        return 7

    monkeypatch.setattr("bagua.cli.doctor.main", warn)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["doctor"]) == 7


@pytest.mark.parametrize("given", [None, "error"])
def test_ranks_without_numpy_start_silently(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(start, "run", lambda args: seen.append(os.environ.get("PYTHONWARNINGS")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONWARNINGS", given)
    assert start.start(get_args_parser().parse_args(["--nproc-per-node", "1", "train.py"]), "bagua run") == 0
    rule = "ignore:Failed to initialize NumPy:UserWarning"
    assert seen == [rule if given is None else f"{rule},{given}"], "the later rule wins"


@pytest.mark.parametrize(("ranks", "given", "expected"), [("2", None, "1"), ("1", None, None), ("2", "3", "3")])
def test_threads_of_a_rank(
    ranks: str,
    given: str | None,
    expected: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[str | None] = []
    monkeypatch.setattr(start, "run", lambda args: seen.append(os.environ.get("OMP_NUM_THREADS")))
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    assert start.start(get_args_parser().parse_args(["--nproc-per-node", ranks, "train.py"]), "bagua run") == 0
    assert seen == [expected]
    said = capsys.readouterr().err
    assert ("one CPU thread" in said) is (given is None and expected == "1") and len(said.splitlines()) <= 1


def test_nohup_keeps_its_meaning(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun handles SIGHUP by default, also where it was ignored."""
    seen: list[str] = []
    monkeypatch.setattr(start, "run", lambda args: seen.append(args.signals_to_handle))
    earlier = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        for disposition in (signal.SIG_DFL, signal.SIG_IGN):
            signal.signal(signal.SIGHUP, disposition)
            start.start(get_args_parser().parse_args(["train.py"]), "bagua run")
    finally:
        signal.signal(signal.SIGHUP, earlier)
    assert "SIGHUP" in seen[0].split(",")
    assert set(seen[1].split(",")) == set(seen[0].split(",")) - {"SIGHUP"}


def test_signals_end_a_command_although_they_were_ignored() -> None:
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with pytest.raises(KeyboardInterrupt), end_by_exception():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        with pytest.raises(SystemExit) as ended, end_by_exception():
            signal.raise_signal(signal.SIGTERM)
        assert ended.value.code == 143
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_ctrl_c_in_a_command_without_an_answer_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bagua.cli.doctor.main", lambda argv: signal.raise_signal(signal.SIGINT))
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert main(["doctor"]) == 130
    finally:
        signal.signal(signal.SIGINT, earlier)
    assert capsys.readouterr().err == "bagua doctor: interrupted\n"


@pytest.mark.process
def test_collections_leave_out_what_a_command_imports(tmp_path: Path) -> None:
    """Only in a process of its own. Afterwards garbage is collected again."""
    (tmp_path / "probe.py").write_text(
        "import gc\nduring = gc.isenabled()\n"
        "def main(argv): return 10 * during + gc.isenabled() + 2 * (gc.get_freeze_count() > 0)"
    )
    code = """
import sys
from bagua.cli import main
main._COMMANDS["probe"] = ("", "probe")
sys.argv = ["bagua", "probe"]
assert (main.main(["probe"]), sys.modules.pop("probe") and main.main()) == (11, 3)
"""
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)


def test_ctrl_c_before_ranks_are_started(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(start, "run", lambda args: signal.raise_signal(signal.SIGINT))
    assert start.start(get_args_parser().parse_args(["train.py"]), "bagua run") == 130
    assert "ended by SIGINT" in capsys.readouterr().err

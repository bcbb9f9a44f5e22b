"""Flags: what they set, what is refused, what is reported."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from bagua.cli.main import main as bagua_main
from bagua.distributed import launch as launch_module
from bagua.distributed import run as run_module
from tests.fork_server import ForkServer
from tests.launch.launching import LAUNCH, MODULE, RUN, launch_forked, script

# No torch in it, so that a launch costs little more than the launcher.
SHOW = """
import json, os, sys
SEEN = ("BAGUA_", "TORCH_DISABLE", "TORCHELASTIC_USE_AGENT_STORE", "LOCAL_RANK", "NODE_RANK", "OMP_")
seen = {k: v for k, v in os.environ.items() if k.startswith(SEEN)}
sys.stdout.write(json.dumps({"argv": sys.argv[1:], **seen}) + "\\n")  # one write: ranks share the stream
"""


def shown(text: str) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda seen: seen["LOCAL_RANK"])


def test_run_sets_the_environment_of_the_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    words = ("--nproc-per-node", "2", "--default-bucket-size", "4096", "--bagua_service_port", "1234")
    ended = launch_forked(fork_server, tmp_path, *RUN, *words, script(tmp_path, SHOW), "--epochs", "3")
    assert ended.code == 0, ended.err
    ranks = shown(ended.out)
    assert [r["LOCAL_RANK"] for r in ranks] == ["0", "1"]
    for r in ranks:
        assert r["argv"] == ["--epochs", "3"]
        assert r["BAGUA_DEFAULT_BUCKET_SIZE"] == "4096"
        # The only attempt shares the launcher's store: no other process can take its port.
        assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in r
        assert r["TORCHELASTIC_USE_AGENT_STORE"] == "True"
        assert r["OMP_NUM_THREADS"] == "1"
    assert ended.err.count("--bagua-service-port has no effect") == 1


def test_attempts_that_can_be_repeated_have_a_store_each(fork_server: ForkServer, tmp_path: Path) -> None:
    ended = launch_forked(fork_server, tmp_path, *RUN, "--max-restarts", "1", script(tmp_path, SHOW))
    assert ended.code == 0, ended.err
    (rank,) = shown(ended.out)
    assert rank["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert rank["TORCHELASTIC_USE_AGENT_STORE"] == "False"


def test_the_users_environment_wins(fork_server: ForkServer, tmp_path: Path) -> None:
    env = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "0",
        "PET_DEFAULT_BUCKET_SIZE": "512",
        "PET_NPROC_PER_NODE": "2",
        "BAGUA_DEFAULT_BUCKET_SIZE": "77",
        "OMP_NUM_THREADS": "2",
    }
    ended = launch_forked(fork_server, tmp_path, *RUN, script(tmp_path, SHOW), env=env)
    assert ended.code == 0, ended.err
    ranks = shown(ended.out)
    assert len(ranks) == 2
    assert {r["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] for r in ranks} == {"0"}
    assert {r["BAGUA_DEFAULT_BUCKET_SIZE"] for r in ranks} == {"512"}
    assert {r["OMP_NUM_THREADS"] for r in ranks} == {"2"}


def test_launch_serves_older_scripts(fork_server: ForkServer, tmp_path: Path) -> None:
    words = [
        "--nproc_per_node=2",
        "--set_additional_flag",
        "--report_metrics",
        "--host_list=a,b",
        "--ssh_port=22",
    ]
    words += ["--logdir", str(tmp_path / "logs"), "--default_bucket_size=99", "--master_addr=127.0.0.1"]
    ended = launch_forked(fork_server, tmp_path, *LAUNCH, *words, script(tmp_path, SHOW), "--lr", "0.1")
    assert ended.code == 0, ended.err
    logs = sorted((tmp_path / "logs").rglob("stdout.log"))
    ranks = shown("".join(log.read_text() for log in logs))
    assert [r["argv"] for r in ranks] == [[f"--local_rank={n}", "--lr", "0.1"] for n in range(2)]
    assert {r["BAGUA_DEFAULT_BUCKET_SIZE"] for r in ranks} == {"99"}
    assert {r["NODE_RANK"] for r in ranks} == {"0"}
    for flag in ("--report-metrics", "--host-list", "--ssh-port"):
        assert ended.err.count(f"{flag} has no effect") == 1


def test_the_module_has_the_defaults_of_the_original(monkeypatch: pytest.MonkeyPatch) -> None:
    def defaults(*prog: str) -> tuple[str, int]:
        args = run_module.get_args_parser(*prog).parse_args(["--use_env", "x.py"])
        return args.nproc_per_node, args.max_restarts

    name = "python -m bagua.distributed.run"
    assert defaults(name) == ("auto", 3)
    assert defaults() == ("1", 0), "torchrun's"
    monkeypatch.setenv("PET_MAX_RESTARTS", "5")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    assert defaults(name) == defaults() == ("2", 5)
    args = launch_module.get_args_parser().parse_args(["--use-env", "--node_rank=1", "x.py"])
    assert args.use_env and args.node_rank == 1


def test_the_module_starts_a_rank_again_that_died(fork_server: ForkServer, tmp_path: Path) -> None:
    """Two times; `bagua run` does not, unless it is told to."""
    die_twice = """
import os, sys
attempts = len([name for name in os.listdir() if name.startswith("attempt")])
open(f"attempt{attempts}", "w").close()
sys.exit(0 if attempts >= 2 else 7)
"""
    path = script(tmp_path, die_twice)
    ended = launch_forked(fork_server, tmp_path, *MODULE, "--nproc_per_node=1", "--monitor-interval=0.1", path)
    assert ended.code == 0, ended.err
    assert (tmp_path / "attempt2").exists()


@pytest.mark.parametrize(
    "underscored",
    [
        "--default_bucket_size=1",
        "--autotune_level=0",
        "--autotune_max_samples=3",
        "--autotune_sampling_confidence_time=2.5",
        "--autotune_warmup_time=1.5",
        "--is_output_autotune_log",
        "--bagua_service_port=1",
        "--enable_bagua_net",
        "--nproc_per_node=2",
        "--max_restarts=2",
    ],
)
@pytest.mark.parametrize("module", [run_module, launch_module])
def test_both_spellings(module: object, underscored: str) -> None:
    parser = module.get_args_parser()  # type: ignore[attr-defined]
    name, equals, value = underscored.partition("=")
    dashed = "--" + name[2:].replace("_", "-") + equals + value
    assert vars(parser.parse_args([dashed, "x.py"])) == vars(parser.parse_args([underscored, "x.py"]))
    assert vars(parser.parse_args([dashed, "x.py"])) != vars(parser.parse_args(["x.py"])) or value == "0"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--autotune-level", "2", "x.py"], "--autotune-level 2: expected 0 (no tuning) or 1"),
        (["--autotune-level", "1", "--autotune-max-samples", "0", "x.py"], "must be positive, not 0"),
        (["--autotune-level", "1", "--autotune-warmup-time", "-1", "x.py"], "must be a number of seconds >= 0, not -1"),
        (["--rank-order", "0,2", "x.py"], "must be measured, or each rank from 0 on once"),
        (["--default-bucket-size", "0", "x.py"], "must be a positive number of bytes, not 0"),
        (["--no-such-flag", "x.py"], "unrecognized arguments: --no-such-flag"),
        ([], "training_script"),
    ],
)
@pytest.mark.parametrize("module", [run_module, launch_module])
def test_refusals(module: object, words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = dict(os.environ)
    with pytest.raises(SystemExit) as ended:
        module.main(words)  # type: ignore[attr-defined]
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert dict(os.environ) == before


@pytest.mark.parametrize("number", ["0", "-1", "two"])
@pytest.mark.parametrize("more", [[], ["--fault-tolerant"]])
def test_no_number_of_ranks(
    number: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert run_module.main(["--nproc-per-node", number, *more, "x.py"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"bagua run: --nproc-per-node {number}: ") and err.count("\n") == 1
    assert "expected a number of at least 1, auto, cpu, gpu or xpu" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nnodes", "2", "--node-rank", "5"], "--node-rank 5: expected 0 to 1, as --nnodes is 2"),
        (["--node-rank", "1"], "--node-rank 1: expected 0 to 0, as --nnodes is 1"),
        (["--log-dir", "/proc/nope"], "--log-dir /proc/nope: cannot be made (No such file or directory)"),
    ],
)
def test_flags_that_cannot_be_had_are_refused_in_one_line(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert run_module.main([*words, "x.py"]) == 2
    assert capsys.readouterr().err == f"bagua run: {message}\n"


def test_tuning_flags_at_level_0_are_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run_module, "start", lambda args, prog: 0)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = ["--autotune-level", "0", "--autotune-max-samples", "5", "--is-output-autotune-log", "x.py"]
    assert bagua_main(["run", *words]) == 0
    err = capsys.readouterr().err
    assert err.count("has no effect") == 2
    assert "--autotune-max-samples has no effect" in err
    assert "--is-output-autotune-log has no effect" in err


def test_tuning_flags_at_level_1_reach_the_ranks(fork_server: ForkServer, tmp_path: Path) -> None:
    words = ("--autotune-level", "1", "--autotune_max_samples", "7", "--autotune-sampling-confidence-time", "0.5")
    more = ("--autotune-warmup-time", "2", "--is-output-autotune-log")
    ended = launch_forked(fork_server, tmp_path, *RUN, "--nproc-per-node", "2", *words, *more, script(tmp_path, SHOW))
    assert ended.code == 0, ended.err
    assert "has no effect" not in ended.err
    for rank in shown(ended.out):
        assert rank["BAGUA_AUTOTUNE"] == "1"
        assert rank["BAGUA_AUTOTUNE_MAX_SAMPLES"] == "7"
        assert float(str(rank["BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S"])) == 0.5
        assert float(str(rank["BAGUA_AUTOTUNE_WARMUP_TIME_S"])) == 2
        assert rank["BAGUA_IS_OUTPUT_AUTOTUNE_LOG"] == "1"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert bagua_main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("bagua ")
    assert bagua_main(["--help"]) == 0
    assert "run" in capsys.readouterr().out
    assert bagua_main(["fly"]) == 2
    err = capsys.readouterr().err
    assert "unknown command 'fly'" in err
    assert "  run " in err
    assert bagua_main([]) == 2

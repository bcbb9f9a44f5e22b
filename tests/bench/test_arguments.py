"""Wrong arguments are refused, and named."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from bagua.bench import contenders
from bagua.bench.conditions import Condition, Pair, parse
from bagua.bench.main import main
from bagua.lab.errors import LabError


def test_conditions() -> None:
    assert parse("1gbit/5ms") == Condition("1gbit/5ms", 1e9, 0.005)
    assert parse("250mbit") == Condition("250mbit", 250e6)
    assert parse("nolimit").bits_per_s == math.inf
    assert parse("1gbit/tcpreno") == Condition("1gbit/tcpreno", 1e9, congestion="reno")
    assert parse("1gbit/0ms/wirerelay") == Condition("1gbit/0ms/wirerelay", 1e9, wire="relay")
    assert parse("2.5gbit/500us/jitter2ms/slow0.5") == Condition(
        "2.5gbit/500us/jitter2ms/slow0.5", 2.5e9, 0.0005, 0.002, 0.5
    )


def test_pairs_of_hosts() -> None:
    found = parse("1gbit/2ms/0-1=50mbit+20ms/2-0=200mbit")
    assert found.pairs == (Pair(0, 1, 50e6, 0.02), Pair(2, 0, 200e6, 0.0))
    assert found.host_bits_per_s(3) == 250e6, "host 0 has these two links only"
    assert found.host_bits_per_s(4) == 1e9, "and one to host 3, with the rate of a host"
    assert found.least_latency_s(3) == 0.002
    assert parse("1gbit/9ms/0-1=50mbit+2ms").least_latency_s(2) == 0.002


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["tradeoff", "--conditions", "1gbit/0mz"], "0mz"),
        (["tradeoff", "--conditions", "5ms"], "bandwidth"),
        (["tradeoff", "--conditions", "1gbit/1ms/2ms"], "two values"),
        (["tradeoff", "--conditions", "1gbit/tcpreno/tcpbbr"], "two values"),
        (["tradeoff", "--conditions", "1gbit/wiretap/wiretbf"], "two values"),
        (["tradeoff", "--conditions", "1gbit/1ms/wiretbf"], "use wirerelay"),
        (["tradeoff", "--conditions", "1gbit/wirebarbed"], "wirebarbed"),
        (["tradeoff", "--conditions", "0mbit"], "more than 0"),
        (["tradeoff", "--conditions", "1gbit/0-0=50mbit"], "between two hosts"),
        (["tradeoff", "--conditions", "1gbit/0-1=50mbit/1-0=60mbit"], "once for each pair"),
        (["tradeoff", "--conditions", "1gbit/0-1=50"], "0-1=50mbit+20ms"),
        (["tradeoff", "--conditions", "1gbit/wiretbf/0-1=50mbit"], "use wirerelay"),
        (["tradeoff", "--hosts", "3", "--conditions", "1gbit/0-3=50mbit"], "0-3 needs more than 3 hosts"),
        (["tradeoff", "--conditions", ","], "conditions"),
        (["tradeoff", "--algorithms", "bytegrat"], "bytegrat"),
        (["tradeoff", "--algorithms", "bytegrad:lanes=2"], "lanes"),
        (["tradeoff", "--algorithms", "ddp:x=2"], "options"),
        (["tradeoff", "--model", "vgg17"], "vgg17"),
        (["tradeoff", "--hosts", "0"], "--hosts"),
        (["tradeoff", "--steps", "0"], "--steps"),
        (["tradeoff", "--compute-ms", "-1"], "--compute-ms"),
        (["tradeoff", "--again", "-1"], "--again"),
        (["tradeoff", "--forward-share", "1.5"], "--forward-share"),
        (["tradeoff", "--profile", "ddp", "--algorithms", "bytegrad"], "--profile"),
        (["curves", "--resume"], "--resume"),
        (["tradeoff", "--resume", "--held-out", "--json", "x.json"], "--resume"),
        (["scaling", "--hosts", "2,0"], "--hosts"),
        (["primitives", "--sizes", "8"], "--sizes"),
        (["primitives", "--hosts", "0"], "--hosts"),
        (["report", "missing.json"], "missing.json"),
        ([], "COMMAND"),
        (["fly"], "fly"),
    ],
)
def test_wrong_arguments(words: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2
    assert named in capsys.readouterr().err


def test_what_this_machine_cannot_emulate_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise LabError("no namespaces here")

    monkeypatch.setattr("bagua.bench.tradeoff.run", refuse)
    assert main(["tradeoff", "--json", str(tmp_path / "out.json")]) == 1
    assert "bagua bench tradeoff: no namespaces here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "again"), [([], 2), (["--quick"], 0), (["--quick", "--again", "1"], 1), (["--again", "0"], 0)]
)
def test_a_quick_run_measures_nothing_again(words: list[str], again: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However disturbed it is, it has to end."""
    seen: list[int] = []
    monkeypatch.setattr("bagua.bench.tradeoff.run", lambda plan, *_: seen.append(plan.again))
    main(["tradeoff", *words])
    assert seen == [again]


def test_a_file_that_is_no_report_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.json").write_text('{"kind": "other"}')
    assert main(["report", str(tmp_path / "other.json")]) == 2
    assert "not written by bagua bench" in capsys.readouterr().err


def test_options_go_behind_a_colon() -> None:
    contender = contenders.get("bytegrad:bucket_bytes=1000,average=False")
    assert contender.options == {"bucket_bytes": 1000, "average": False}
    assert contender.name == "bytegrad:bucket_bytes=1000,average=False"


def test_every_algorithm_takes_part() -> None:
    import bagua

    algorithms = {contender.algorithm for contender in contenders.available().values()} - {""}
    assert algorithms == {row.name for row in bagua.algorithms.available()}

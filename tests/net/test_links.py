"""Links between network namespaces: IPv6, queues that drop, and the benchmark itself. Needs root."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bagua.bench import net as bench
from bagua.bench.main import main as bench_main
from bagua.bench.net_cases import CASES, GOALS, Sample
from bagua.bench.net_links import FlowCaps, Namespaces, Queue, missing
from bagua.bench.net_report import markdown
from bagua.net.driver import run_pair

needs_namespaces = pytest.mark.skipif(bool(missing()), reason=missing() or "-")


def transfer(shape: Queue | FlowCaps | None, env: dict[str, str], **options: object) -> list[int]:
    with Namespaces(shape) as hosts:
        settings = {**hosts.environment, **env}
        given = {"mode": "rate", "seconds": 0.5, **options}
        pair = run_pair(60, hosts.prefixes, (settings, settings), **given)
    for ended in (pair.sender, pair.receiver):
        assert ended.status == 0, (ended.results, ended.errors)
    return pair.receiver.results[-1]["channels"]


@needs_namespaces
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6"])
def test_both_address_families(family: str) -> None:
    (received,) = transfer(None, {"NCCL_SOCKET_FAMILY": family, "BAGUA_NET_ADAPT": "0"})
    assert received > 0


@needs_namespaces
def test_fuzz_over_a_queue_that_drops() -> None:
    with Namespaces(Queue("1gbit", "64kb", "500us")) as hosts:
        env = {**hosts.environment, "BAGUA_NET_ADAPT": "0", "BAGUA_NET_FLOWS": "4", "BAGUA_NET_STATS": "1"}
        pair = run_pair(60, hosts.prefixes, (env, env), mode="fuzz", messages=40, seed=11)
    assert (pair.sender.status, pair.receiver.status) == (0, 0), (pair.sender, pair.receiver)
    assert pair.receiver.results[-1]["messages"] == 40


@needs_namespaces
def test_limits_per_flow_are_filled() -> None:
    """Not a matter of speed: the link itself gives one flow a tenth of what several get."""
    caps = FlowCaps("1gbit", ("100mbit",))
    one = transfer(caps, {"BAGUA_NET_FLOWS": "1"}, warmup_seconds=0.3)
    eight = transfer(caps, {"BAGUA_NET_ADAPT": "0"}, warmup_seconds=0.3)
    assert sum(eight) > 3 * sum(one)


@pytest.mark.slow
def test_the_flow_count_grows_by_itself() -> None:
    """Over loopback with a rate for each socket: no root needed."""
    case = next(case for case in CASES if case.name == "paced")
    sample = bench.measure(case, {})
    assert sample.gbit_s > 3, "one socket may send 1 Gbit/s"


def test_goals_are_judged() -> None:
    def row(case: str, variant: str, rate: float, others: float = 0.0) -> dict[str, object]:
        sample = Sample(rate, rate, (0.1, 0.3), 0.95, others)
        return {
            "case": case,
            "variant": variant,
            **{name: getattr(sample, name) for name in Sample.__dataclass_fields__},
        }

    rows = [
        row("paced", "one", 1.0),
        row("paced", "default", 6.0),
        row("paced", "default", 8.0),
        row("paced", "default", 7.5),
    ]
    rows += [
        row("paced", "one", 500.0, others=0.5),
        row("uneven", "16 equal stripes", 5.0),
        row("unshaped", "default", 9.0),
    ]
    judged = {each["goal"]: each for each in bench.judge(rows)}
    assert len(judged) == len(GOALS)
    assert judged["paced sockets, times one flow"]["value"] == 7.5 and judged["paced sockets, times one flow"]["met"]
    assert judged["uneven flows in equal stripes, Gbit/s"]["met"] is False
    assert judged["unshaped, CPU seconds per GB and side"]["met"] is False
    assert judged["shallow queue, Gbit/s"] == {
        "goal": "shallow queue, Gbit/s", "wanted": 1.7, "at_most": False, "value": None, "met": None,
    }  # fmt: skip


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_main(["net", "--cases", "loop"]) == 2
    assert "no case 'loop'; there are paced" in capsys.readouterr().err
    file = tmp_path / "net.json"
    words = ["net", "--cases", "paced", "--scale", "0.05", "--json", str(file)]
    assert bench_main(words) == 0
    assert bench_main([*words, "--append"]) == 0
    report = json.loads(file.read_text())
    assert len(report["runs"]) == 4 and all("gbit_s" in run for run in report["runs"]), report["runs"]
    assert report["machine"]["cores"] >= 1 and report["machine"]["congestion_control"]
    assert "paced         one" in capsys.readouterr().out
    assert {run["congestion"] for run in report["runs"]} == {report["machine"]["congestion_control"]}
    assert bench_main(["net", "--table", str(file)]) == 0
    assert "| loopback, 1 Gbit/s per socket | default | " in capsys.readouterr().out
    assert bench_main([*words, "--append", "--runs", "3", "--budget-s", "1e-9"]) == 0
    assert "is used up after 0 of 3 rounds" in capsys.readouterr().out


def test_tables_of_results() -> None:
    """Medians of what counts; the number of the rest; runs of another congestion control apart."""

    def run(rate: float, others: float = 0.0, **more: object) -> dict[str, object]:
        made = {"case": "shallow", "variant": "default", "gbit_s": rate, "typical_gbit_s": rate}
        return {**made, "cpu_s_per_gb": [0.5, 0.25], "evenness": 1.0, "others_cpu": others, **more}

    runs = [run(1.0), run(2.0), run(1.5), run(9.0, others=0.5), run(1.25, congestion="cubic")]
    report = {"machine": {"congestion_control": "bbr", "cores": 2, "cpu": "some"}, "runs": runs}
    first, second = markdown(report, bench.judge).split("TCP with ")[1:]
    assert first.startswith("bbr, 2 cores") and second.startswith("cubic, 2 cores")
    assert "| 2 Gbit/s, 256 KB, 2 ms | default | 3 of 4 | 1.50 | 1.00 to 2.00 | 1.50 | 0.50 |" in first
    assert "| shallow queue, Gbit/s | at least 1.7 | 1.5 | missed |" in first
    assert "| 2 Gbit/s, 256 KB, 2 ms | default | 1 | 1.25 | 1.25 to 1.25 | 1.25 | 0.50 |" in second
    assert "| very shallow queue, Gbit/s | at least 1.2 | not measured |  |" in second


def test_a_file_that_holds_no_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "net.json"
    for text in ("{}", "[", "[]"):
        file.write_text(text)
        assert bench_main(["net", "--table", str(file)]) == 2
        assert "--table" in capsys.readouterr().err

"""A slow host: `python -m benchmarks.decoupled [--json FILE] [--quick]`.

Four hosts, each a process, train the small transformer of `benchmarks.convergence.byte_gpt` with AdamW. A step takes
`--step-ms` at least, and on the last host 1 / `--speed` times that: the rest of the time it sleeps, as a slower
processor would compute. DiLoCo and Decoupled DiLoCo each train with all hosts alike, and with the slow host.

All runs make the same number of steps in total, so they see as many tokens. With DiLoCo each host makes the same number
of them. With Decoupled DiLoCo a host takes its next step from a counter, until none is left; the schedule of the
learning rate follows the counter. Reported is the goodput, steps of all hosts a second, and the validation loss of the
averaged weights. There is no network between the processes but that of one machine. With `--emulated` a step is a
linear layer and sleep, a step that took too long shortens the next one, and there is no loss: with other load on the
machine, steps of the transformer take longer than `--step-ms`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import multiprocessing
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import bagua
from bagua.bench import progress, results_file
from bagua.bench.layout import Columns
from bagua.bench.machine import describe_machine, now
from benchmarks.char_lm import draw_windows
from benchmarks.convergence.byte_gpt import (
    BATCH,
    TASKS,
    WARM,
    ByteGPT,
    Task,
    held_out_loss,
    load_source,
    make_optimizers,
)

__all__ = ["parse", "rows_of"]

SYSTEMS = ("diloco", "decoupled_diloco")
_TIMEOUT_S = 900


def parse(options: Sequence[str]) -> dict[str, Any]:
    """Options of an algorithm, from `name=value`.

    Raises:
        ValueError: names what is no such pair.
    """
    found = {}
    for each in options:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise ValueError(f"--option: expected name=value, got {each!r}")
        try:
            found[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):  # a word
            found[name] = value
    return found


def work(rank: int, folder: str, port: int, run: dict[str, Any], settings: dict[str, Any]) -> None:
    """One host."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(settings["hosts"])}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    import_module("bagua.contrib")
    bagua.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    task, hosts, total = TASKS[settings["task"]], settings["hosts"], settings["hosts"] * settings["steps"]
    text = load_source(task.text)[0]
    generator = torch.Generator().manual_seed(1000 * settings["seed"] + rank)
    emulated = settings.get("emulated", False)
    _warm_up(task)
    torch.manual_seed(settings["seed"])
    model = nn.Linear(64, 64) if emulated else ByteGPT(task)
    optimizers = make_optimizers("adamw", list(model.parameters()), task)
    rates = [(group, group["lr"]) for each in optimizers for group in each.param_groups]
    options = {"communication_interval": settings["interval"], **run["options"]}
    bagua.distribute(model, optimizers, run["system"], bucket_bytes=task.bucket_bytes, **options)
    store = dist.TCPStore("127.0.0.1", port + 1, hosts, rank == 0)
    store.add("there", 1)
    while store.add("there", 0) < hosts:
        time.sleep(0.001)
    pace_s, made, started = settings["step_ms"] / 1000 / run["speeds"][rank], 0, time.time()
    busy_s: list[float] = []
    due = time.perf_counter()  # when the emulated step ends
    while True:
        begun = time.perf_counter()
        # Emulated hosts make up for what the machine has overslept, a step at most: not for waiting for others.
        due = max(due, begun - pace_s) + pace_s if emulated else begun + pace_s
        number = store.add("steps", 1) - 1 if run["system"] == "decoupled_diloco" else hosts * made
        if number >= total:
            break
        grown = min(1.0, (number + hosts) / (WARM * total))
        for group, rate in rates:
            group["lr"] = rate * grown * 0.5 * (1 + math.cos(math.pi * number / total))
        if emulated:
            model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        else:
            inputs, following = draw_windows(text, BATCH, task.context, generator)
            F.cross_entropy(model(inputs).flatten(0, 1), following.flatten()).backward()
        busy_s.append(time.perf_counter() - begun)
        time.sleep(max(0.0, due - time.perf_counter()))
        for each in optimizers:
            each.step()
            each.zero_grad()
        made += 1
    ended = time.time()
    extra = {name: [series.count, series.mean, series.last] for name, series in bagua.stats(model).extra.items()}
    sent = bagua.stats(model).total.bytes_sent
    bagua.average_parameters(model)
    found = {
        "rank": rank,
        "steps": made,
        "started": started,
        "ended": ended,
        "busy_ms": 1000 * statistics.median(busy_s),
    }
    found |= {
        "mb": sent / 1e6,
        "extra": extra,
        "loss": held_out_loss(task, model) if rank == 0 and not emulated else 0.0,
    }
    results_file.write(Path(folder) / f"{rank}.json", found)
    store.add("done", 1)
    while rank == 0 and store.add("done", 0) < hosts:  # it serves the store
        time.sleep(0.01)


def _warm_up(task: Task) -> None:
    """Import and set up what a first step does, which takes seconds."""
    model = ByteGPT(task)
    model(torch.zeros(BATCH, task.context, dtype=torch.int64)).sum().backward()
    for each in make_optimizers("adamw", list(model.parameters()), task):
        each.step()


def measure(run: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """One training on all hosts.

    Raises:
        RuntimeError: a host ended with an error.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="bagua-decoupled-") as folder:
        port = _free_ports()
        hosts = [
            context.Process(target=work, args=(rank, folder, port, run, settings)) for rank in range(settings["hosts"])
        ]
        for host in hosts:
            host.start()
        for host in hosts:
            host.join(_TIMEOUT_S)
        for host in hosts:
            with contextlib.suppress(ValueError):
                host.kill()
        if any(host.exitcode for host in hosts):
            raise RuntimeError(f"{run['name']}: hosts ended with {[host.exitcode for host in hosts]}")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(settings["hosts"])]
    seconds = max(each["ended"] for each in found) - min(each["started"] for each in found)
    steps = [each["steps"] for each in found]
    return {
        **run,
        "seed": settings["seed"],
        "steps": steps,
        "seconds": seconds,
        "goodput": sum(steps) / seconds,
        "loss": found[0]["loss"],
        "mb": statistics.fmean(each["mb"] for each in found),
        "busy_ms": max(each["busy_ms"] for each in found),
        "extra": found[0]["extra"],
    }


def rows_of(measured: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means over the seeds; goodput beside that of the same algorithm without a slow host, loss beside DiLoCo's."""

    def mean(name: str, slow: bool, what: str) -> float:
        of = [each[what] for each in measured if each["name"] == name and (min(each["speeds"]) < 1) == slow]
        return statistics.fmean(of)

    rows = []
    for name, slow in dict.fromkeys((each["name"], min(each["speeds"]) < 1) for each in measured):
        names = {each["name"] for each in measured}
        alone = "diloco" not in names
        goodput, loss = mean(name, slow, "goodput"), mean(name, slow, "loss")
        row: dict[str, Any] = {"name": name, "slow_host": slow, "goodput": goodput, "loss": loss}
        row["goodput_lost_percent"] = 100 * (1 - goodput / mean(name, False, "goodput"))
        row["loss_percent"] = None if alone or not loss else 100 * (loss / mean("diloco", slow, "loss") - 1)
        row["each_loss_percent"] = [
            100 * (mine["loss"] / other["loss"] - 1)
            for mine in measured
            for other in measured
            if loss
            and (mine["name"], min(mine["speeds"]) < 1) == (name, slow)
            and (other["name"], min(other["speeds"]) < 1, other["seed"]) == ("diloco", slow, mine["seed"])
        ]
        row["mb"] = mean(name, slow, "mb")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print the table, maybe write the file."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoupled", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write results there, after every run")
    parser.add_argument("--task", choices=list(TASKS), default="small-headers", help="default: %(default)s")
    parser.add_argument("--seeds", default="71,72", help="default: %(default)s")
    parser.add_argument("--hosts", type=int, default=4, help="default: %(default)s")
    parser.add_argument("--speed", type=float, default=0.5, help="of the slow host (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=640, help="for each host, on average (default: %(default)s)")
    parser.add_argument("--interval", type=int, default=32, help="inner steps of a round (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=40.0, help="default: %(default)s")
    parser.add_argument("--only", default=",".join(SYSTEMS), metavar="NAMES", help="default: %(default)s")
    parser.add_argument("--slow-only", action="store_true", help="leave out the runs without a slow host")
    parser.add_argument("--option", action="append", default=[], metavar="NAME=VALUE", help="of decoupled_diloco")
    parser.add_argument("--emulated", action="store_true", help="next to no compute: for goodput on a busy machine")
    parser.add_argument("--quick", action="store_true", help="some seconds, to see that it runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.hosts, args.steps, args.interval, args.step_ms = "71", 2, 12, 4, 20.0
    given = parse(args.option)
    settings = {key: getattr(args, key) for key in ("task", "hosts", "steps", "interval", "step_ms", "emulated")}
    speeds = [1.0] * args.hosts
    paces = [[*speeds[:-1], args.speed]] if args.slow_only else [speeds, [*speeds[:-1], args.speed]]
    measured: list[dict[str, Any]] = []
    for seed in map(int, args.seeds.split(",")):
        for name in args.only.split(","):
            for pace in paces:
                progress.show(f"seed {seed}, {name}, speeds {pace}")
                options = given if name == "decoupled_diloco" else {}
                run = {"name": name, "system": name, "options": options, "speeds": pace}
                measured.append(measure(run, {**settings, "seed": seed}))
                if args.json:
                    facts = {"date": now(), "bagua": bagua.__version__, "machine": describe_machine()}
                    facts["settings"] = {**settings, "speed": args.speed}
                    facts["data"] = load_source(TASKS[args.task].text)[2]
                    whole = not args.slow_only and len(measured) % len(paces) == 0
                    rows = rows_of(measured) if whole else []
                    results_file.write(args.json, {**facts, "rows": rows, "measured": measured})
    progress.clear()
    if args.slow_only:
        for each in measured:
            print(
                f"{each['name']} {each['options']}: {each['goodput']:.1f} steps/s, loss {each['loss']:.4f}",
                each["extra"],
            )
        return 0
    columns = Columns(
        ("algorithm", -18), ("slow host", -10), ("steps/s", 9), ("lost, %", 9), ("loss", 8), ("beside diloco, %", 18)
    )
    print(
        columns.table(
            [
                [row["name"], "yes" if row["slow_host"] else "no", f"{row['goodput']:.1f}",
                 f"{row['goodput_lost_percent']:.1f}", f"{row['loss']:.4f}",
                 "" if row["loss_percent"] is None else f"{row['loss_percent']:+.2f}"]
                for row in rows_of(measured)
            ]
        )
    )  # fmt: skip
    return 0


def _free_ports() -> int:
    """A port of loopback, such that the next one is free, too."""
    for port in range(21000 + os.getpid() % 5000, 32000, 2):
        with contextlib.suppress(OSError), socket.socket() as one, socket.socket() as two:
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise RuntimeError("no free ports")


if __name__ == "__main__":
    sys.exit(main())

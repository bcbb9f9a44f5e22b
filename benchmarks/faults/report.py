"""Rows as tables, and which targets they miss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bagua.bench.layout import markdown_table
from bagua.lab.link import bits_per_second
from benchmarks.faults.scenarios import SCENARIOS

__all__ = ["TARGETS", "chaos_misses", "chaos_table", "fault_misses", "fault_table"]

TARGETS = {
    "resumed_s": 1.0,  # of survivors, after detection
    "lost_steps": 1,
    "arrival_steps": 2.0,  # that others wait
    "back_s": 10.0,  # and the state at `link_share`
    "link_share": 0.7,
    "throughput": 0.977,  # of the fault-free one
    "participation": 0.9,
    "loss_ratio": 0.02,  # from 1
}
_HEAD = (
    *("system, algorithm", "hosts", "fault", "detected, s", "next step after it, s", "next step after the fault, s"),
    *("steps lost", "replicas", "others restarted", "back, s", "of it start, s"),
    *("others waited, steps", "and lost in all", "missed"),
)
_CHAOS_HEAD = (
    *("algorithm", "hosts", "faults, an hour", "throughput", "lost a fault, s", "throughput at 125 an hour"),
    *("ranks in a step", "loss", "undisturbed", "replicas", "growth", "missed"),
)
_LARGE = 10_000_000  # bytes of state whose transfer can be timed
_LEAK_KB = 65536  # of a rank's memory; less is the allocator's
_LEAK_KEYS = 2  # a group has some 19
_LEAK_EACH = 3  # threads or sockets that may just be in use


def fault_misses(row: dict[str, Any]) -> list[str]:
    """Return the targets that a row misses, and its problems."""
    found = list(row["problems"])
    if row["system"] != "bagua":
        return found
    deadly = row["fault"].startswith(("kill", "vanish"))
    cuts = row["fault"].startswith(("partition-minority", "stop"))  # the others go on
    if cuts and (row["resumed_s"] is None or row["resumed_s"] > TARGETS["resumed_s"]):
        found.append("next step later than 1 s after detection")
    if row["fault"] in ("loss", "slow") and not row.get("steps"):
        found.append("no step was made")
    if row["fault"] == "slow" and row.get("waits", True) and not row.get("named"):
        found.append("the slow host was not named")
    if deadly and (row["resumed_s"] is None or row["resumed_s"] > TARGETS["resumed_s"]):
        found.append("next step later than 1 s after detection")
    if deadly and (row["lost_steps"] or 0) > TARGETS["lost_steps"]:
        found.append("more than 1 step lost")
    allowed = TARGETS["back_s"] + 8 * row["state_bytes"] / (TARGETS["link_share"] * bits_per_second(row["bandwidth"]))
    returns = deadly or cuts or row["fault"].startswith("partition")
    if returns and (row["back_s"] is None or row["back_s"] > allowed):
        found.append(f"back later than {allowed:.1f} s")
    share = link_share(row)
    if share is not None and share < TARGETS["link_share"]:
        found.append(f"state at {100 * share:.0f} % of the link")
    if (row["arrival_steps"] or 0) > TARGETS["arrival_steps"]:
        found.append("others waited more than 2 steps for an arrival")
    if (row["trained_apart"] or 0) > row.get("local_steps", 0):  # those of an interval need nobody, and are dropped
        found.append(f"{row['trained_apart']} steps made by hosts that were cut off")
    if row["restarted"]:
        found.append("hosts restarted to which nothing was done")
    return found


def link_share(row: dict[str, Any]) -> float | None:
    """Return the share of the link at which the state came; None if it is too small to tell."""
    if row["state_bytes"] < _LARGE or not row.get("transfer_s"):
        return None
    return 0.8 * 8 * row["state_bytes"] / row["transfer_s"] / bits_per_second(row["bandwidth"])


def fault_table(rows: Sequence[dict[str, Any]], not_run: Sequence[dict[str, str]]) -> str:
    """Return Markdown; a system that cannot run has a line that says why."""
    cells = []
    for row in rows:
        title = SCENARIOS[row["fault"]].title if row["fault"] in SCENARIOS else row["fault"]
        if row["state_bytes"] > _LARGE:
            title += f", {row['state_bytes'] / 1e6:.0f} MB of state"
        share = link_share(row)
        if share is not None:
            title += f" at {100 * share:.0f} % of the link"
        cells.append(
            [
                row["system"]
                + (" --preload" if row.get("preload") else "")
                + (f", {row['algorithm']}" if row["system"] in ("bagua", "elastic") else ""),
                *(str(row["hosts"]), title),
                *(_seconds(row[name]) for name in ("detected_s", "resumed_s", "gap_s")),
                _number(row["lost_steps"]),
                _replicas(row),
                ", ".join(map(str, row["restarted"])) or "none",
                *(_seconds(row[name]) for name in ("back_s", "start_s")),
                _number(row["arrival_steps"]),
                _number(row.get("arrival_lost_steps")),
                "; ".join(fault_misses(row)) or "nothing",
            ]
        )
    cells += [[each["system"], "", "not run: " + each["why"], *([""] * 11)] for each in not_run]
    return markdown_table(_HEAD, cells)


def chaos_misses(row: dict[str, Any]) -> list[str]:
    """Return the targets that a chaos run misses, and its problems."""
    found = list(row["problems"])
    at_anchor = row["throughput_at_anchor"]
    if at_anchor is None or at_anchor < TARGETS["throughput"]:
        found.append("less than 97.7 % of the fault-free throughput")
    if row["participation"] is None or row["participation"] < TARGETS["participation"]:
        found.append("less than 90 % of the live ranks in a step")
    if "loss_ratio" not in row:
        found.append("loss not compared with the undisturbed one")
    elif row["loss_ratio"] > 1 + TARGETS["loss_ratio"]:
        found.append("loss more than 2 % above the undisturbed one")
    if row["equal_expected"] and row["unequal"]:
        found.append(f"weights differ after {row['unequal']} steps")
    return found + leaks(row["growth"], row["hosts"])


def leaks(growth: dict[str, float], hosts: int = 0) -> list[str]:
    """Return what has grown by more than chance.

    Args:
        hosts: whose ranks connect to the store of the first one. Another launcher's is used once that host is lost. A
            launcher whose rank was lost has a thread to tell each of the others. The first rank serves those that
            arrive, at most all others: each over a connection to the store, and a group of gloo with its thread.
    """
    found = []
    for key, value in growth.items():
        limit = _LEAK_KB if key.endswith("memory_kb") else _LEAK_KEYS if key == "keys_per_change" else _LEAK_EACH
        limit += 2 * hosts if key in ("launcher_sockets", "launcher_descriptors", "launcher_threads") else 0
        limit = max(hosts - 1, limit) if key == "serving" else limit
        limit += 2 * max(growth.get("serving", 0), 0) if key in ("threads", "descriptors", "sockets") else 0
        if value > limit:
            found.append(f"{key} +{value:.0f}")
    return found


def chaos_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return Markdown."""
    cells = []
    for row in rows:
        grown = ", ".join(f"{key} {value:+.0f}" for key, value in row["growth"].items())
        cells.append(
            [
                *(row["algorithm"], str(row["hosts"]), f"{row['faults']}, {row['per_hour']:g}"),
                *(_percent(row["throughput"]), _seconds(row["lost_s_per_fault"])),
                *(_percent(row["throughput_at_anchor"]), _percent(row["participation"])),
                *(_number(row.get("loss"), 3), _number(row.get("undisturbed_loss"), 3)),
                f"equal, {row['compared']} steps" if not row["unequal"] else f"differ in {row['unequal']}",
                grown or "not known",
                "; ".join(chaos_misses(row)) or "nothing",
            ]
        )
    return markdown_table(_CHAOS_HEAD, cells)


def _replicas(row: dict[str, Any]) -> str:
    if not row["equal_expected"]:
        return "differ by design"
    return f"equal, {row['compared']} steps" if not row["unequal"] else f"differ in {row['unequal']} steps"


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"

"""The metrics: names, units and how each is read from a snapshot of `bagua.stats`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from bagua.engine import Quality, Stats

__all__ = ["METRICS", "Metric", "scalars"]

_WORDS = {"By": "_bytes", "s": "_seconds"}


@dataclass(frozen=True)
class Metric:
    """One value of a snapshot.

    Attributes:
        name: without prefix and unit, as in OpenTelemetry.
        unit: in the notation of UCUM: "By", "s", "1", or what is counted, in braces.
        description: one sentence, as Prometheus and OpenTelemetry show it.
        read: returns the value, or None if it is not known (yet) in this job.
        counter: a sum since the module was distributed, which never falls; otherwise a value of the moment.
        per_step: of a counter: its increase per step is a scalar too.
    """

    name: str
    unit: str
    description: str
    read: Callable[[Stats], float | None]
    counter: bool = False
    per_step: bool = False

    @property
    def key(self) -> str:
        """The name with its unit: `sent_bytes`."""
        return self.name + _WORDS.get(self.unit, "")

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of its scalars."""
        if not self.counter or self.name == "steps":
            return (self.key,)
        return (f"{self.key}_total", f"{self.key}_per_step") if self.per_step else (f"{self.key}_total",)


def _cost(name: str, unit: str, description: str, read: Callable[[Stats], float]) -> Metric:
    return Metric(name, unit, description, read, counter=True, per_step=True)


def _quality(name: str, description: str, read: Callable[[Quality], float]) -> Metric:
    return Metric(name, "1", description, lambda stats: None if stats.quality is None else read(stats.quality))


METRICS: tuple[Metric, ...] = (
    Metric("steps", "{step}", "Training steps completed.", lambda s: s.steps, counter=True),
    _cost("sent", "By", "Bytes that this rank sent.", lambda s: s.total.bytes_sent),
    _cost("received", "By", "Bytes that this rank received.", lambda s: s.total.bytes_received),
    _cost("payload", "By", "Size in memory of the exchanged tensors.", lambda s: s.total.payload_bytes),
    _cost(
        "dense", "By", "Bytes that a ring all-reduce in full precision would have sent.", lambda s: s.total.dense_bytes
    ),
    _cost("communication", "s", "Seconds during which communication ran.", lambda s: s.total.comm_s),
    _cost(
        "exposed_communication",
        "s",
        "Seconds during which training waited for communication.",
        lambda s: s.total.exposed_s,
    ),
    _cost("exchanges", "{exchange}", "Exchanges launched.", lambda s: s.total.launches),
    Metric(
        "compression_ratio",
        "1",
        "Dense bytes divided by bytes sent, in the last step that communicated.",
        lambda s: s.last.compression_ratio,
    ),
    _quality(
        "compression_cosine", "Cosine between the decoded and the exact mean, as Guard measured.", lambda q: q.cosine
    ),
    _quality(
        "compression_relative_error",
        "Norm of the compression error divided by the norm of the exact mean, as Guard measured.",
        lambda q: q.relative_error,
    ),
    _quality(
        "compression_residual",
        "Norm of the error feedback residuals divided by the norm of their values, as Guard measured.",
        lambda q: q.residual,
    ),
    _quality(
        "consensus_distance",
        "Distance of the ranks' weights from their mean divided by the norm of the mean, as Guard measured.",
        lambda q: q.consensus,
    ),
    Metric("world_size", "{rank}", "Ranks that train the module now.", lambda s: s.size),
    Metric(
        "membership_changes",
        "{change}",
        "Changes of the members, with fault tolerance.",
        lambda s: len(s.membership),
        counter=True,
    ),
    Metric(
        "membership_stalled",
        "s",
        "Seconds during which this rank could not train because the members changed.",
        lambda s: sum(change.stalled_s for change in s.membership),
        counter=True,
    ),
    Metric("buckets", "{bucket}", "Buckets; 0 until the first backward pass.", lambda s: s.num_buckets),
    Metric("bucket", "By", "Size of all buckets.", lambda s: sum(s.bucket_bytes)),
    Metric("scratch", "By", "Memory for encoded data and staging.", lambda s: s.scratch_bytes),
    Metric("notices", "{notice}", "Fallbacks and options without effect; the log has them.", lambda s: len(s.notices)),
    Metric(
        "autotune_samples",
        "{sample}",
        "Settings that autotuning has measured.",
        lambda s: None if s.tuning is None else s.tuning.num_samples,
    ),
    Metric(
        "autotune_best_step",
        "s",
        "Seconds of a step with the best settings found.",
        lambda s: None if s.tuning is None else s.tuning.best_step_s,
    ),
)


def scalars(stats: Stats, since: Stats | None = None) -> dict[str, float]:
    """Return a snapshot as a flat dict of numbers, with the units in the names.

    Args:
        stats: a snapshot of `bagua.stats`.
        since: an earlier one of the same module. Keys that end in `_per_step` are means over the steps between the two;
            without it, over all steps.

    Returns:
        The values of docs/metrics.md. A value that is not known is left out: those of a `Guard` before its first
        measurement, for example.

    Examples:
        >>> values = bagua.metrics.scalars(bagua.stats(model))
        >>> values["steps"], values["sent_bytes_total"]
        (1, 0)
    """
    steps = stats.steps - (since.steps if since is not None else 0)
    found: dict[str, float] = {}
    for metric in METRICS:
        value = metric.read(stats)
        if value is None:
            continue
        found[metric.keys[0]] = value
        if metric.per_step:
            before = metric.read(since) if since is not None else None
            found[metric.keys[1]] = (value - (before or 0)) / steps if steps > 0 else 0.0
    for name, series in stats.extra.items():
        found |= {f"{name}_last": series.last, f"{name}_mean": series.mean, f"{name}_max": series.max}
    return found

"""Kinds of algorithms: what they exchange, which guarantees they keep, and what a lost rank costs them."""

from __future__ import annotations

from enum import Enum

__all__ = ["Exactness", "LostStep", "Payload"]


class Payload(Enum):
    """Which tensors a bucket holds.

    Attributes:
        GRAD: gradients.
        PARAM: weights; the parameters are views of the bucket.
    """

    GRAD = "grad"
    PARAM = "param"


class Exactness(Enum):
    """Which guarantees of synchronous SGD an algorithm keeps.

    Attributes:
        EXACT: every step uses the mean gradient of all ranks in full precision; replicas stay equal, bit for bit.
        LOSSY: every step uses the same compressed mean on all ranks; replicas stay equal, bit for bit.
        PERIODIC: replicas take local steps, differ, and synchronise with all others every few steps.
        DECENTRALIZED: each replica averages its weights with those of some peers; replicas differ.
        ASYNCHRONOUS: weights are averaged in the background while training continues; replicas differ, and a run cannot
            be repeated bit for bit.
    """

    EXACT = "exact"
    LOSSY = "lossy synchronous"
    PERIODIC = "periodic"
    DECENTRALIZED = "decentralized"
    ASYNCHRONOUS = "asynchronous"

    @property
    def replicas_equal(self) -> bool:
        """Whether all ranks hold the same weights after every step."""
        return self in (Exactness.EXACT, Exactness.LOSSY)


class LostStep(Enum):
    """What becomes of a step in which a rank is lost, with `fault_tolerant` (docs/design/0010-recovery.md).

    Attributes:
        SKIP: no rank applies it: weights and optimizer state stay as they were. A rank that lacks a step that another
            one has applied fetches weights and optimizer state, so replicas stay equal. For algorithms whose weights
            change in the optimizer only, after the exchange.
        REPEAT: the ranks that are left repeat the exchange with which the step ends; each keeps its own weights and
            optimizer state until it counts (`Context.commit`). A rank that lacks an exchange that counts takes over the
            state of a rank that has it. For algorithms whose replicas differ between two exchanges. A step that
            averages gradients is lost as with SKIP.
        KEEP: each rank makes the step with its own gradients and without the exchange. A rank that has begun fewer
            steps than others goes on at theirs, with its own weights and optimizer state. For replicas that differ, and
            whose weights an exchange that fails leaves fit to train with.
        FREE: no step waits for other ranks, so none is lost. Groups are opened beside training; a rank keeps its own
            weights and counts its own steps. For algorithms that exchange in the background only.
    """

    SKIP = "skip"
    REPEAT = "repeat"
    KEEP = "keep"
    FREE = "free"

"""The bounds, against numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from bagua.bench import bounds, contenders, models
from bagua.bench.bounds import Moment, Timing, Traffic, bound_s
from bagua.bench.layers import Layer

N = 25_000_000
TIMING = Timing(step_s=0.34, forward_s=0.1, optimizer_s=0.04)


@pytest.mark.parametrize(
    ("traffic", "num_bytes", "messages", "moment"),
    [
        (bounds.all_to_all_mean(N, 4, 32), 150_000_000, 2, Moment.GRADIENT),  # 8 N (R-1)/R
        (bounds.all_to_all_mean(N, 4, 8), 37_500_000, 2, Moment.GRADIENT),  # 2 N (R-1)/R
        (bounds.all_to_all_mean(N, 4, 1), 4_687_500, 2, Moment.GRADIENT),  # N (R-1)/(4 R)
        (bounds.gossip(N, 4), 100_000_000, 1, Moment.PARAMETER),  # 4 N
        (bounds.difference_gossip(N, 4), 50_000_000, 1, Moment.STEP),  # 2 N
        (bounds.difference_gossip(N, 2), 25_000_000, 1, Moment.STEP),  # one neighbour
        (bounds.background(N, 4), 150_000_000, 0, Moment.BACKGROUND),
        # 100 x 50: 4 (100 + 50) = 600 factors instead of 5000; a vector of 10; 4 x 4 would not get smaller.
        (bounds.low_rank(((100, 50), (10,), (4, 4)), 4, 4), 8 * (600 + 10 + 16) * 3 / 4, 4, Moment.GRADIENT),
    ],
)
def test_what_a_host_sends(traffic: Traffic, num_bytes: float, messages: int, moment: Moment) -> None:
    assert traffic == Traffic(num_bytes, messages, moment)


def test_headers_take_their_part_of_a_link() -> None:
    assert bounds.payload_bits_per_s(1514e6) == 1448e6 and bounds.payload_bits_per_s(math.inf) == math.inf


@pytest.mark.parametrize(
    ("traffic", "bits_per_s", "latency_s", "expected"),
    [
        # 0.1 + 8 * 150e6 / 1e9 + 2 * 0.005 + 0.04
        (bounds.all_to_all_mean(N, 4, 32), 1e9, 0.005, 1.35),
        (bounds.all_to_all_mean(N, 4, 8), 1e9, 0.0, 0.44),
        # 0.1 + 0.0375 + 0.04 is less than the computation
        (bounds.all_to_all_mean(N, 4, 1), 1e9, 0.0, 0.34),
        # leaves at the start of the step: 0.8 + 0.005 + 0.04
        (bounds.gossip(N, 4), 1e9, 0.005, 0.845),
        # after the step: 0.34 + 0.4 + 0.005, or hidden: 0.4 + 0.005 + 0.04
        (bounds.difference_gossip(N, 4), 1e9, 0.005, 0.405),
        (bounds.background(N, 4), 1e6, 1.0, 0.34),
        # once in 8 steps: 0.34 + 1.2 / 8
        (bounds.all_to_all_mean(N, 4, 32, Moment.AFTER, 8), 1e9, 0.0, 0.49),
        # hidden behind 64 steps of 0.34, and of 0.01 only with the bound of the wire: 12.04 / 64
        (bounds.all_to_all_mean(N, 4, 32, Moment.PARAMETER, 64), 1e8, 0.0, 0.34),
        (bounds.all_to_all_mean(N, 4, 32), math.inf, 0.0, 0.34),
    ],
)
def test_the_least_time_of_a_step(traffic: Traffic, bits_per_s: float, latency_s: float, expected: float) -> None:
    assert bound_s(traffic, TIMING, bits_per_s, latency_s) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 3, 1.45),  # the last is ready at 0.1 + 0.1; then 1.2 on the wire, 0.01 of latency and 0.04
        (0, 4, 1.45),
        (4, 0, 1.55),  # all of it is ready at 0.1 + 0.2 only
    ],
)
def test_gradients_leave_when_they_are_there(first: int, last: int, expected: float) -> None:
    """Two layers of equal work, which the backward pass of 0.2 s reaches in reverse order."""
    layers = [Layer("first", ((first,),), 1.0), Layer("last", ((last,),), 1.0)]
    sent = bounds.all_to_all_mean(N, 4, 32)
    assert bound_s(sent, TIMING, 1e9, 0.005, layers) == pytest.approx(expected)
    as_told = Traffic(sent.bytes_per_host, 2, Moment.GRADIENT, layer_bytes=(1.0, 0.0))
    assert bound_s(as_told, TIMING, 1e9, 0.005, layers) == pytest.approx(1.55)


@pytest.mark.parametrize("contender", contenders.available().values(), ids=lambda contender: contender.name)
def test_every_contender_sends_nothing_alone_and_something_in_company(contender: contenders.Contender) -> None:
    model = models.get("resnet50/10")
    assert contender.traffic(model, 1).bytes_per_host == 0
    assert (contender.traffic(model, 4).bytes_per_host > 0) is not contender.name.startswith(contenders.OFF)


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("bytegrad", 8),
        ("bytegrad:bucket_bytes=1000000", 8),
        ("bytegrad:codec=eden:bits=1", 1.125),
        ("bytegrad:codec=eden:bits=1,gather_codec=eden:bits=2", 1.625),
        ("gradient_allreduce:codec=bf16", 16),
        ("diloco:codec=int4", 4.25),
    ],
)
def test_a_codec_that_is_named_counts(text: str, bits: float) -> None:
    model, ranks = models.get("layers25m/10"), 4
    sent = contenders.get(text).traffic(model, ranks).bytes_per_host
    assert sent == pytest.approx(2 * model.num_elements * (ranks - 1) / ranks * bits / 8, rel=1e-4)


@pytest.mark.parametrize("name", ["gradient_allreduce", "bytegrad", "qadam_1bit", "decentralized_shift_one"])
def test_formulas_agree_with_what_the_algorithms_say(name: str) -> None:
    import bagua

    contender, model = contenders.get(name), models.get("layers25m")
    algorithm = bagua.algorithms.get(contender.algorithm, **contender.options)
    said = algorithm.bytes_per_rank(model.num_elements, 4)
    assert contender.traffic(model, 4).bytes_per_host == pytest.approx(said, rel=0.03)  # codecs add scales


def test_options_change_what_a_host_sends() -> None:
    model = models.get("layers25m")

    def traffic(text: str) -> Traffic:
        return contenders.get(text).traffic(model, 4)

    ranks = {rank: traffic(f"power_sgd:rank={rank}") for rank in (4, 8)}
    assert ranks[8] == traffic("power_sgd")
    assert ranks[8].bytes_per_host == 2 * ranks[4].bytes_per_host
    assert traffic("power_sgd:rank=None").bytes_per_host > ranks[8].bytes_per_host  # by shape, at least 16 here
    by_eights = traffic("local_sgd:communication_interval=2,codec=minmax_uint8")
    assert (by_eights.every, by_eights.moment) == (2, Moment.AFTER)
    assert by_eights.bytes_per_host == pytest.approx(37_500_000, rel=0.01)
    assert traffic("diloco").moment is Moment.PARAMETER
    rare = traffic("diloco:communication_interval=3,delay=0,codec=eden:bits=3")
    assert (rare.every, rare.moment) == (3, Moment.AFTER)
    assert rare.bytes_per_host == pytest.approx(3 / 8 * 37_500_000, rel=0.05)


def test_gossip_with_an_interval_is_still_beside_the_step() -> None:
    model = models.get("layers25m")
    for name in ("decentralized", "low_precision_decentralized"):
        usual = contenders.get(name)
        every = {interval: contenders.get(f"{name}:communication_interval={interval}") for interval in (1, 4)}
        assert every[1].traffic(model, 4) == usual.traffic(model, 4)
        assert every[4].traffic(model, 4) == replace(usual.traffic(model, 4), every=4)
        assert (every[1].period, every[4].period) == (1, 4)
        assert every[1].warmup_steps == usual.warmup_steps


def test_wrong_values_are_refused_by_name() -> None:
    for value in ("often", "2.5", "0"):
        with pytest.raises(ValueError, match="contender 'diloco:communication_interval=.*communication_interval"):
            contenders.get(f"diloco:communication_interval={value}")


def test_whole_rounds_are_measured() -> None:
    rounds = contenders.get("diloco:communication_interval=3")  # without the delay of its default, which is longer
    assert (rounds.period, rounds.warmup_steps) == (66, 66)
    assert contenders.get("local_sgd:communication_interval=2").period == 8

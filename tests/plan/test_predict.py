"""Predictions keep what must hold for any model and cluster, and agree with what was measured."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import pytest

from bagua.bench import contenders, models
from bagua.bench.bounds import Timing, bound_s
from bagua.codecs import Bf16, Eden, Fp16, Int4, Sign
from bagua.codecs.trellis_torch import TRELLISES
from bagua.exchanges import AllReduce, Exchange, PowerSGD, ScatterGather
from bagua.plan import CPU, GPU, Cluster, Workload, load_model, predict
from bagua.plan.phases import TorchPowerSGD, phases_of
from bagua.plan.prediction import gathered_buckets
from bagua.plan.recipe import DEFAULT_NAMES, recipe_of
from benchmarks import plan

VGG = Workload.of(load_model("vgg16"), 0.15)
SLOW = Cluster(hosts=16, devices=8, bandwidth=10e9, latency=1e-4, inner_bandwidth=1e12, inner_latency=1e-5)


@pytest.mark.parametrize("name", DEFAULT_NAMES)
def test_never_below_the_bound_of_the_link(name: str) -> None:
    model = load_model("layers25m")
    workload = Workload.of(model, 0.3, 0.02)
    timing = Timing(workload.step_s, workload.forward_s, workload.optimizer_s)
    for bandwidth, latency in ((1e8, 5e-3), (1e9, 0.0), (1e10, 1e-3)):
        cluster = Cluster(4, bandwidth=bandwidth, latency=latency, cores=math.inf)
        traffic = contenders.get(name).traffic(model, 4)
        if name == "diloco":  # an exchange that has half of the steps of its period
            continue
        least = bound_s(traffic, timing, bandwidth, latency)
        assert predict(name, workload, cluster, GPU).step_s >= 0.999 * least, (name, bandwidth)


@pytest.mark.parametrize(("bits", "states"), TRELLISES)
def test_a_trellis_takes_longer_but_hardly_on_a_gpu(bits: int, states: int) -> None:
    workload, cluster = Workload.of(load_model("layers25m"), 0.1), Cluster(4, bandwidth=1e10, latency=1e-5)
    plain, trellis = (f"bytegrad:codec=eden:bits={bits}{more}" for more in ("", f":states={states}"))
    cpu, gpu = (
        predict(trellis, workload, cluster, costs).step_s - predict(plain, workload, cluster, costs).step_s
        for costs in (CPU, GPU)
    )
    assert 0 < gpu < cpu / 20


def test_means_in_another_codec_count_half_the_bytes_and_a_part_of_the_search() -> None:
    workload = Workload.of(load_model("layers25m"), 0.1)
    one, mixed, two = (f"bytegrad:codec=eden:bits={bits}" for bits in ("1", "1,gather_codec=eden:bits=2", "2"))
    sent = [predict(name, workload, Cluster(4, bandwidth=1e8)).bytes_per_host for name in (one, mixed, two)]
    assert sent[1] == pytest.approx((sent[0] + sent[2]) / 2, rel=1e-3)
    both, late = (f"{one}{more}" for more in (":states=32", ",gather_codec=eden:bits=1:states=32"))
    steps = [predict(name, workload, Cluster(4, bandwidth=1e10)).step_s for name in (one, late, both)]
    assert steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("name", DEFAULT_NAMES)
def test_a_faster_link_is_never_slower_and_one_rank_needs_none(name: str) -> None:
    small = Workload.of(load_model("layers25m/10"), 0.05)
    steps = [predict(name, small, Cluster(4, bandwidth=rate, latency=1e-3)).step_s for rate in (1e8, 1e9, 1e10)]
    assert all(faster <= slower * (1 + 1e-9) for slower, faster in pairwise(steps))
    assert predict(name, small, Cluster(1)).step_s == pytest.approx(small.step_s)


def test_gossip_among_leaders_waits_for_the_sum_within_the_host_only() -> None:
    workload = Workload.of(load_model("layers25m"), 0.3)
    one, four = (Cluster(4, devices=n, bandwidth=1e8, inner_bandwidth=1e10) for n in (1, 4))
    names = ("low_precision_decentralized", "low_precision_decentralized_overlap")
    waits, beside = (predict(name, workload, four).step_s - predict(name, workload, one).step_s for name in names)
    assert waits > 0.01 and beside < waits / 2


def test_bytes_are_those_that_algorithms_say() -> None:
    cluster, workload = Cluster(4, bandwidth=1e9), Workload.of(load_model("layers25m"), 0.1)
    for name in ("gradient_allreduce", "bytegrad", "qadam_1bit", "decentralized_shift_one", "local_sgd", "diloco"):
        traffic = contenders.get(name).traffic(workload.model, 4)
        sent = predict(name, workload, cluster).bytes_per_host
        assert sent == pytest.approx(traffic.bytes_per_host / traffic.every, rel=0.03), name


def test_the_order_of_the_originals_figure_at_10_gbit() -> None:
    """arXiv:2107.01499, figure 7: VGG16 on 16 hosts of 8 GPUs. There low-precision gossip waited for its exchange."""
    names = ("async", "low_precision_decentralized", "bytegrad", "qadam", "decentralized", "ddp")
    steps = [predict(name, VGG, SLOW, GPU).step_s for name in names]
    assert steps == sorted(steps)
    assert steps[-1] / steps[2] > 3 and steps[-1] / steps[-2] < 1.3


def test_a_slow_host_holds_up_all_but_asynchronous_training() -> None:
    fast, slow = Cluster(4, bandwidth=1e10), Cluster(4, bandwidth=1e10, slowest=0.5)
    workload = Workload.of(load_model("layers25m/10"), 0.3)
    assert predict("bytegrad", workload, slow).step_s > 1.8 * predict("bytegrad", workload, fast).step_s
    assert predict("async", workload, slow).step_s == pytest.approx(workload.step_s)


def test_buckets_hold_every_element_once_in_the_order_of_the_backward_pass() -> None:
    for name in DEFAULT_NAMES:
        for model in (load_model("vgg16/10"), load_model("350m"), load_model("bert_large/10")):
            recipe = recipe_of(name, model, Cluster(4, devices=2))
            assert sum(bucket.numel for bucket in recipe.buckets) == model.num_elements
            layers = [bucket.layer for bucket in recipe.buckets]
            assert layers == sorted(layers)


@pytest.mark.process
def test_what_is_planned_by_default_does_not_depend_on_imports() -> None:
    """Other packages register algorithms; a name of one that is gone again could not be looked up."""
    code = "import bagua.contrib; from bagua.plan.recipe import DEFAULT_NAMES; print(*DEFAULT_NAMES)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert found.split() == list(DEFAULT_NAMES) and "decoupled_diloco" not in found.split()


def test_16384_ranks() -> None:
    """A ring sends no more the longer it is; where each sends to all others, the number of messages limits."""
    big = replace(SLOW, hosts=2048)
    assert big.ranks == 16384
    steps = {name: [predict(name, VGG, each, GPU).step_s for each in (SLOW, big)] for name in ("bytegrad", "ddp")}
    assert steps["bytegrad"][0] < steps["ddp"][0] < steps["ddp"][1] < 1.2 * steps["ddp"][0]
    assert steps["bytegrad"][1] > 2 * 2047 * 2 * GPU.message_s


def test_measured_tables() -> None:
    """Most cells that no constant was fitted to are within 15 %; measured on 2 to 8 hosts."""
    cells = [cell for table in plan.TABLES for cell in plan.cells_of(table)]
    judged = plan.summary(cells)["not fitted to"]
    assert judged["cells"] > 100
    assert judged["within_tolerance"] > 0.9 and judged["median_error"] < 0.05
    assert plan.summary(cells)[plan.FITTED_GROUP]["within_tolerance"] > 0.95


def test_far_away_on_a_link_that_nothing_was_chosen_on() -> None:
    """All but one step of the wide-area table for judging are within 15 %, with either congestion control."""
    cells = list(plan.cells_of("2026-11-26-latency/wan_judged.json"))
    assert len(cells) == 14 and {cell["condition"] for cell in cells} == {"80mbit/30ms", "80mbit/30ms/tcpreno"}
    errors = sorted(abs(cell["ratio"] - 1) for cell in cells)
    assert errors[-2] < plan.TOLERANCE and errors[-1] < 0.2


@pytest.mark.parametrize(
    ("name", "near", "far"),
    [("gradient_allreduce", 1, 3), ("bytegrad", 3, 5), ("qadam_1bit", 4, 8), ("power_sgd", 4, 8), ("ddp", 2, 2)],
)
def test_lanes_far_away(name: str, near: int, far: int) -> None:
    """More of them where an exchange waits for latencies; as `bagua.distribute` opens over the native transport."""
    model = load_model("25m")
    assert recipe_of(name, model, Cluster(4, bandwidth=1e8, latency=1e-3)).lanes == near
    assert recipe_of(name, model, Cluster(4, bandwidth=5e8, latency=0.05)).lanes == far


def test_buckets_and_lanes_that_are_given_count() -> None:
    model, cluster = load_model("25m"), Cluster(4, bandwidth=1e9, latency=1e-3)
    default, small = (recipe_of(name, model, cluster) for name in ("bytegrad", "bytegrad:bucket_bytes=1048576"))
    assert len(small.buckets) > len(default.buckets)
    assert recipe_of("gradient_allreduce:num_lanes=1", model, cluster).lanes == 1
    workload = Workload.of(model, 0.3)
    one, all_lanes = (predict(f"bytegrad{text}", workload, cluster).step_s for text in (":num_lanes=1", ""))
    assert one > all_lanes
    for options, message in (("num_lanes=0", "num_lanes: expected"), ("bucket_bytes=0", "bucket_bytes: expected")):
        with pytest.raises(ValueError, match=message):
            predict(f"bytegrad:{options}", workload, cluster)


def test_copies_of_an_exchange_beside_the_next_step() -> None:
    """Where compute hides the exchange, three passes over the weights are left, on half a core."""
    plenty = Workload.of(load_model("25m"), 60.0)
    cluster = Cluster(4, bandwidth=1e9, cores=0.5)
    step_s = predict("low_precision_decentralized_overlap", plenty, cluster).step_s
    numel = load_model("25m").num_elements
    assert step_s - plenty.step_s == pytest.approx(3 * numel * CPU.element_s / 0.5, rel=1e-6)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hosts": 0}, "hosts: expected a positive int, got 0"),
        ({"hosts": True}, "hosts: expected a positive int"),
        ({"hosts": 2, "devices": 1.5}, "devices: expected a positive int"),
        ({"hosts": 2, "bandwidth": 0}, "bandwidth: expected a number > 0"),
        ({"hosts": 2, "latency": -1.0}, "latency: expected seconds >= 0"),
        ({"hosts": 2, "latency": math.nan}, "latency: expected seconds >= 0"),
        ({"hosts": 2, "slowest": 1.5}, "slowest: expected a speed in"),
    ],
)
def test_wrong_clusters(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster(**values)  # pyright: ignore[reportArgumentType]


def test_wrong_workloads() -> None:
    model = load_model("10m")
    with pytest.raises(ValueError, match="compute_s: expected seconds"):
        Workload.of(model, -1.0)
    with pytest.raises(ValueError, match="forward_s: 2.0 is more than"):
        Workload(model, 1.0, 2.0)
    with pytest.raises(ValueError, match="contender 'nonsense' is unknown"):
        predict("nonsense", Workload.of(model, 1.0), Cluster(2))
    with pytest.raises(ValueError, match="how 'horovod' spends a step is not known"):
        predict("horovod", Workload.of(model, 1.0), Cluster(2))


def test_the_interval_of_an_option_counts() -> None:
    workload, cluster = Workload.of(load_model("25m"), 0.05), Cluster(4, bandwidth=1e9, latency=1e-3)
    steps = [predict(f"local_sgd:communication_interval={k}", workload, cluster).step_s for k in (2, 4, 8)]
    assert steps[0] > steps[1] > steps[2] == predict("local_sgd", workload, cluster).step_s
    at_once = predict("diloco:communication_interval=16,delay=0", workload, cluster)
    beside = predict("diloco:communication_interval=16,delay=8", workload, cluster)
    assert beside.step_s < at_once.step_s


def test_a_rotated_code_costs_more_on_both_ways() -> None:
    """Measured on one thread: 2.5 times the passes of int4 to encode, 1.4 times to decode."""
    cluster, n = Cluster(4, bandwidth=1e9), 10_000_000
    phases = [
        phases_of(ScatterGather(codec, error_feedback=False), n, cluster, CPU) for codec in (Eden(bits=4), Int4())
    ]
    for rotated, plain in list(zip(*phases, strict=True))[:2]:
        more = rotated.before_s + rotated.beside_s - plain.before_s - plain.beside_s
        assert 0.5 < more / (n * CPU.element_s) < 1.5


def test_power_sgd_costs_products_and_one_pass_and_more_passes_in_the_hook_of_ddp() -> None:
    n, m, rank = 512, 256, 4
    cluster, free = Cluster(4), replace(CPU, element_s=0.0, matmul_s_per_flop=0.0)

    def arithmetic(exchange: PowerSGD, mean: AllReduce) -> float:
        """Without what the means of the factors cost."""
        busy, idle = (
            sum(each.before_s for each in phases_of(exchange, n * m, cluster, costs)) for costs in (CPU, free)
        )
        means = sum(
            each.before_s for elements in (n * rank, m * rank) for each in phases_of(mean, elements, cluster, CPU)
        )
        assert idle == 0.0
        return busy - means

    one_pass = n * m * CPU.element_s
    product = 2 * n * m * rank * CPU.matmul_s_per_flop + 0.9 * one_pass
    ring = AllReduce(direct_bytes=0)
    assert arithmetic(PowerSGD(((n, m),), rank), AllReduce()) == pytest.approx(4 * product + one_pass)
    assert arithmetic(TorchPowerSGD(((n, m),), rank), ring) == pytest.approx(3 * product + 6 * one_pass)


def waits(exchange: Exchange, n: int, cluster: Cluster, gathered: bool = False) -> float:
    """Latencies, one after the other."""
    found = phases_of(exchange, n, cluster, replace(CPU, wake_s=0.0), gathered=gathered)
    return sum(each.wait_s for each in found) / cluster.latency


def test_who_forms_means_itself_waits_half_as_often() -> None:
    cluster, n = Cluster(4, bandwidth=1e8, latency=0.05), 64 * 4096
    for exchange, usual in ((ScatterGather(Sign()), 2), (AllReduce(Bf16()), 2), (PowerSGD(((64, 4096),), 4), 4)):
        assert waits(exchange, n, cluster) == pytest.approx(usual)
        assert waits(exchange, n, cluster, gathered=True) == pytest.approx(usual / 2)


def test_one_bit_far_away_is_gathered_and_eight_are_not() -> None:
    """Of 2.5 M parameters: 0.5 and 4 MB a host where an owner forms each mean, and 0.9 and 7.5 MB otherwise."""
    workload = Workload.of(models.get("layers25m/10"), 0.1)
    near, far = (Cluster(4, bandwidth=1e8, latency=seconds) for seconds in (1e-3, 0.05))
    sent = {
        name: [predict(name, workload, cluster).bytes_per_host for cluster in (near, far)]
        for name in ("qadam_1bit", "bytegrad")
    }
    assert sent["qadam_1bit"][1] / sent["qadam_1bit"][0] == pytest.approx(2, rel=0.1)
    assert sent["bytegrad"][0] == pytest.approx(sent["bytegrad"][1])


def test_who_does_not_form_means_itself() -> None:
    """Torch's own, ranks that are near, several ranks of each of two hosts, and NCCL."""
    model, far = models.get("layers25m/10"), Cluster(2, bandwidth=1e8, latency=0.05)

    def some(name: str, cluster: Cluster) -> bool:
        return any(gathered_buckets(recipe_of(name, model, cluster), cluster))

    assert some("power_sgd", far) and some("qadam_1bit", replace(far, hosts=4))
    assert not some("ddp_powersgd", far)
    assert not some("power_sgd", replace(far, latency=1e-3)) and not some("power_sgd", replace(far, devices=4))
    workload, cluster = Workload.of(model, 0.1), replace(far, hosts=4)
    over_nccl, over_gloo = (predict("power_sgd", workload, cluster, costs).bytes_per_host for costs in (GPU, CPU))
    assert over_gloo == pytest.approx(2 * over_nccl, rel=0.1)


def test_the_hook_of_ddp_has_three_means_in_rings_one_after_the_other() -> None:
    """Of what is not compressed, of left factors, of right factors: 2 (R-1) latencies each."""
    cluster, shapes = Cluster(4, latency=5e-3), ((64, 64), (1, 64))
    n = 64 * 64 + 64
    assert waits(TorchPowerSGD(shapes, 4), n, cluster) == pytest.approx(3 * 6)
    assert waits(TorchPowerSGD(shapes[:1], 4), 64 * 64, cluster) == pytest.approx(2 * 6)
    assert waits(PowerSGD(shapes, 4), n, cluster) == pytest.approx(2 * 2)


def test_torch_averages_all_weights_in_one_ring() -> None:
    model, cluster = load_model("25m"), Cluster(4, bandwidth=1e8, latency=5e-3)
    (bucket,) = recipe_of("post_local_sgd", model, cluster).buckets
    assert bucket.numel == model.num_elements
    assert waits(bucket.exchange, bucket.numel, cluster) == pytest.approx(6)
    (copies, ring) = phases_of(bucket.exchange, bucket.numel, cluster, CPU)
    assert copies.before_s == pytest.approx(2 * bucket.numel * CPU.element_s)
    assert ring.sent == pytest.approx(2 * 4 * bucket.numel * 3 / 4)


def test_momenta_cost_a_pass_on_both_ways() -> None:
    assert recipe_of("qadam", load_model("25m"), Cluster(4)).momenta
    assert not recipe_of("bytegrad", load_model("25m"), Cluster(4)).momenta
    cluster, n = Cluster(4), 1_000_000
    one, two = (phases_of(ScatterGather(Int4()), n, cluster, CPU, momenta) for momenta in (True, False))
    more = [a.before_s + a.beside_s - b.before_s - b.beside_s for a, b in zip(one, two, strict=True)]
    assert more == pytest.approx([n * CPU.element_s, n * CPU.element_s, 0.0])


def test_sums_of_fp16_cost_more_than_those_of_bf16() -> None:
    cluster, n = Cluster(4), 1_000_000
    half, brain = (phases_of(AllReduce(codec, direct_bytes=0), n, cluster, CPU)[0] for codec in (Fp16(), Bf16()))
    assert half.beside_s - brain.beside_s == pytest.approx(2.0 * n * CPU.element_s)
    assert (half.host_bytes, half.wait_s) == (brain.host_bytes, brain.wait_s)


def test_a_table_with_a_slow_host_holds_its_times_and_not_those_of_the_others() -> None:
    """Compute, forward pass and optimizer step of such a row are the slow host's."""
    cells = {cell["algorithm"]: cell["ratio"] for cell in plan.cells_of("2026-11-21-bench/straggler.json")}
    exchanged = ("ddp", "gradient_allreduce", "bytegrad", "decentralized", "local_sgd")
    assert all(0.85 < cells[name] < 1.15 for name in exchanged), cells

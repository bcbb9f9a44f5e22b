"""`bagua.distribute(transport="native")`: the same training over other sockets, and the same failures."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import bagua
from bagua.comm import mesh, mesh_connect, team_sockets
from bagua.comm import transport as transport_module
from bagua.comm.connecting import LateGloo
from bagua.comm.mesh import Mesh, why_no_mesh
from bagua.comm.team import Team
from bagua.comm.transport import (
    FAR_LANES,
    FAR_LANES_OF_SUMS,
    NEAR_LANES_OF_SUMS,
    chosen_transport,
    slow_bytes_per_s,
    why_no_transport,
)
from bagua.engine.distributed_module import attachment_of
from bagua.engine.startup import link_probe, request
from bagua.engine.startup.link_probe import Links
from bagua.engine.startup.request import Request
from tests.rank_pool import RankPool
from tests.rank_threads import run_teams

_making = threading.Lock()
there = pytest.mark.skipif(bool(why_no_mesh()), reason=why_no_mesh() or "there is one")
SYSTEMS: dict[str, tuple[Any, dict[str, Any]]] = {
    "bytegrad": ("bytegrad", {}),
    "int4": ("gradient_allreduce", {"codec": "int4"}),
    "sign": ("gradient_allreduce", {"codec": "sign"}),
    "eden": ("gradient_allreduce", {"codec": "eden"}),
    "full precision": ("gradient_allreduce", {}),
    "ring": ("gradient_allreduce", {"hierarchical": False}),
    "half precision": ("gradient_allreduce", {"codec": "bf16"}),
    "shift one": ("decentralized", {"peer_selection_mode": "shift_one"}),
    "power_sgd": ("power_sgd", {"rank": 2}),
    "gossip": ("low_precision_decentralized", {}),
    "hierarchical": ("bytegrad", {"hierarchical": True}),
}


def make_model() -> nn.Module:
    with _making:  # ranks that are threads share torch's generator
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 10))


def train(team: Team, transport: str | None, system: str, steps: int = 4, qadam: bool = False) -> Any:
    """Weights, and what was counted."""
    model = make_model()
    algorithm, options = SYSTEMS[system]
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if qadam:
        algorithm, options = "qadam", {}
        optimizer = bagua.optim.QAdam(model.parameters(), lr=0.01, warmup_steps=2)
    model = bagua.distribute(
        model, optimizer, algorithm, process_group=team, transport=transport, num_lanes=2, bucket_bytes=9000, **options
    )
    for step in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, 40, generator=torch.Generator().manual_seed(100 * team.rank + step))
        model(x).square().mean().backward()
        optimizer.step()
    bagua.pause(model)  # what is in flight ends
    lanes = attachment_of(model).engine.pool.shared
    sent, launches = (
        sum(meter.sent for lane in lanes for meter in lane.groups.meters),
        bagua.stats(model).total.launches,
    )
    native = [lane.groups.native for lane in lanes]
    bagua.detach(model)
    return [param.detach().clone() for param in model.parameters()], sent, launches, native


@there
@pytest.mark.parametrize("system", [*SYSTEMS, "qadam"])
def test_training_has_the_bits_and_the_statistics_that_it_has_over_gloo(system: str) -> None:
    nodes = {"hierarchical": [0, 0, 1], "ring": [0, 0, 0]}.get(system, [0, 1, 2])
    name = "bytegrad" if system == "qadam" else system
    args = name, 4, system == "qadam"
    over_gloo = run_teams(3, train, "gloo", *args, nodes=nodes)
    for first, second in zip(over_gloo, run_teams(3, train, "native", *args, nodes=nodes), strict=True):
        assert all(map(torch.equal, first[0], second[0]))
        assert first[1:3] == second[1:3] and first[1] > 0
        assert first[3] == [False, False] and second[3] == [True, True]


def trained(team: Team, transport: str | None, unable: Sequence[int] = ()) -> tuple[list[Tensor], list[bool]]:
    """Weights in the end, and whether lanes are native."""
    with pytest.MonkeyPatch.context() as patch:
        if team.rank in unable:
            patch.setattr(team, "without_mesh", True, raising=False)
        weights, _, _, native = train(team, transport, "int4")
    return weights, native


@there
def test_by_default_it_is_used_where_all_ranks_have_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def why(transport: str | None, team: Team, device: torch.device) -> ValueError | None:
        return ValueError("_mesh.so was not built") if getattr(team, "without_mesh", False) else None

    monkeypatch.delenv("BAGUA_TRANSPORT", raising=False)
    over_gloo = run_teams(3, trained, "gloo")
    assert all(native == [False, False] for _, native in over_gloo)
    for (first, _), (second, native) in zip(over_gloo, run_teams(3, trained, None), strict=True):
        assert native == [True, True] and all(map(torch.equal, first, second))
    monkeypatch.setattr(transport_module, "why_no_transport", why)
    with caplog.at_level("INFO", "bagua"):
        found = run_teams(3, trained, None, [1])
    for (first, _), (second, native) in zip(over_gloo, found, strict=True):
        assert native == [False, False] and all(map(torch.equal, first, second))
    told = [each.getMessage() for each in caplog.records if "gloo carries" in each.getMessage()]
    assert told == ["gloo carries all exchanges: rank 1: _mesh.so was not built"]


@there
@pytest.mark.parametrize("failing", [2, 4, 5])  # of the first lane, and of the second
def test_by_default_gloo_takes_over_where_ranks_cannot_be_connected(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failing: int
) -> None:
    listen, lock, calls = mesh_connect.listen, threading.Lock(), list[int]()

    def listen_but_once(host: str | None, size: int) -> team_sockets.Offer:
        with lock:
            calls.append(size)
            if len(calls) == failing:
                raise bagua.CommunicationError("cannot listen on 192.0.2.1: no such address")
        return listen(host, size)

    monkeypatch.delenv("BAGUA_TRANSPORT", raising=False)
    expected = run_teams(3, trained, "gloo")
    monkeypatch.setattr(mesh_connect, "listen", listen_but_once)
    with caplog.at_level("WARNING", "bagua"):
        found = run_teams(3, trained, None)
    for (first, _), (second, native) in zip(expected, found, strict=True):
        assert native == ([False, False] if failing <= 3 else [True, False])
        assert all(map(torch.equal, first, second))
    told = [each.getMessage() for each in caplog.records if "gloo carries" in each.getMessage()]
    assert len(told) == 1 and "cannot listen on 192.0.2.1" in told[0]
    calls.clear()
    with pytest.raises(AssertionError, match="native transport cannot be opened"):
        run_teams(3, trained, "native")
    calls.clear()
    monkeypatch.setenv(mesh_connect.CONGESTION, "reno")  # who sets it up wants it
    with pytest.raises(AssertionError, match="native transport cannot be opened"):
        run_teams(3, trained, None)


def test_a_congestion_control_of_one_rank_is_told_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """It raises on a rank whose kernel lacks it, while those that have named none would go on over gloo."""

    def work(team: Team) -> str:
        mine.name = "no_such_one" if team.rank == 1 else None
        with pytest.raises(bagua.RankMismatchError) as failed:
            trained(team, None)
        return str(failed.value)

    mine = threading.local()
    monkeypatch.setattr(request, "congestion_control", lambda: mine.name)
    for text in run_teams(3, work):
        assert "BAGUA_NATIVE_CONGESTION differs: rank 1 has no_such_one, rank 0 has the kernel's choice" in text


@there
def test_a_switch_keeps_the_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_TRANSPORT", raising=False)

    def work(team: Team) -> list[bool]:
        model, found = make_model(), list[bool]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for transport in (None, "gloo", None, "native", None):
            bagua.distribute(model, optimizer, "bytegrad", process_group=team, transport=transport)
            found.append(attachment_of(model).engine.groups.native)
        bagua.detach(model)
        return found

    assert run_teams(2, work) == [[True, False, False, True, True]] * 2


def lanes(team: Team, transport: str, num_lanes: int | None = None, codec: str = "int4") -> tuple[int, list[Tensor]]:
    """How many lanes are open for 10 buckets, and weights after a step."""
    with _making:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(40, 40, bias=False) for _ in range(10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"bucket_bytes": 1000, "num_lanes": num_lanes} | ({"codec": codec} if codec else {})
    model = bagua.distribute(model, optimizer, "gradient_allreduce", process_group=team, transport=transport, **options)
    model(torch.randn(8, 40, generator=torch.Generator().manual_seed(team.rank))).square().mean().backward()
    optimizer.step()
    found = len(attachment_of(model).engine.pool.shared)
    bagua.detach(model)
    return found, [param.detach().clone() for param in model.parameters()]


@there
def test_more_lanes_where_a_rank_is_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    near = run_teams(3, lanes, "native")
    assert [num for num, _ in near] == [4] * 3
    # One rank alone knows of a long way; all take as many lanes, and the bits are the same.
    monkeypatch.setattr(Mesh, "round_trip_s", property(lambda self: 0.04 if self.rank == 1 else 0.0))
    far = run_teams(3, lanes, "native")
    assert [num for num, _ in far] == [FAR_LANES] * 3
    for (_, first), (_, second) in zip(near, far, strict=True):
        assert all(map(torch.equal, first, second))
    assert [num for num, _ in run_teams(3, lanes, "native", 2)] == [2] * 3
    for codec in ("minmax_uint8", ""):  # which would not use them
        assert [num for num, _ in run_teams(3, lanes, "native", None, codec)] == [4] * 3
    assert [num for num, _ in run_teams(3, lanes, "gloo")] == [4] * 3


@there
@pytest.mark.parametrize(("given", "near", "far"), [(None, NEAR_LANES_OF_SUMS, FAR_LANES_OF_SUMS), (6, None, None)])
def test_plain_sums_have_fewer_lanes_on_slow_links_and_far_away(
    monkeypatch: pytest.MonkeyPatch, given: int | None, near: int | None, far: int | None
) -> None:
    def most(team: Team) -> int | None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(
            model, optimizer, "gradient_allreduce", process_group=team, transport="native", num_lanes=given
        )
        found = attachment_of(model).engine.config.lanes_of_sums
        bagua.detach(model)
        return found

    monkeypatch.setattr(link_probe, "FAST_BYTES_PER_S", math.inf)  # a fast link has few of them anyway
    assert run_teams(3, most) == [None] * 3  # so few bytes do not tell
    monkeypatch.setattr(link_probe, "slow_bytes_per_s", lambda num_bytes: math.inf)
    assert run_teams(3, most) == [near] * 3
    monkeypatch.setattr(Mesh, "round_trip_s", property(lambda self: 0.04))
    assert run_teams(3, most) == [far] * 3


def test_small_models_have_to_be_slower_to_tell() -> None:
    mib = 2**20
    assert [slow_bytes_per_s(n * mib) for n in (0, 3, 4, 7, 8, 1000)] == [0.0, 0.0, 40e6, 40e6, 80e6, 80e6]


@pytest.mark.parametrize(("round_trip_s", "more"), [(0.029, 4), (0.03, FAR_LANES)])
def test_over_gloo_more_lanes_only_where_a_rank_is_farther(
    monkeypatch: pytest.MonkeyPatch, round_trip_s: float, more: int
) -> None:
    monkeypatch.setattr(link_probe, "_round_trip_s", lambda team: 0.0)
    near = run_teams(3, lanes, "gloo")
    assert [num for num, _ in near] == [4] * 3
    monkeypatch.setattr(link_probe, "_round_trip_s", lambda team: round_trip_s if team.rank == 1 else 0.0)
    far = run_teams(3, lanes, "gloo")
    assert [num for num, _ in far] == [more] * 3
    for (_, first), (_, second) in zip(near, far, strict=True):
        assert all(map(torch.equal, first, second))
    assert [num for num, _ in run_teams(3, lanes, "gloo", 2)] == [2] * 3, "what the user says"
    for codec in ("minmax_uint8", ""):  # which would not use them
        assert [num for num, _ in run_teams(3, lanes, "gloo", None, codec)] == [4] * 3


@there
@pytest.mark.parametrize("system", ["int4", "full precision", "shift one", "gossip", "power_sgd", "half precision"])
def test_lanes_but_the_first_do_without_gloo(system: str) -> None:
    def work(team: Team) -> list[bool]:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        algorithm, options = SYSTEMS[system]
        bagua.distribute(
            model,
            optimizer,
            algorithm,
            process_group=team,
            transport="native",
            num_lanes=3,
            bucket_bytes=4000,
            **options,
        )
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 40) * team.rank).square().mean().backward()
            optimizer.step()
        groups = [lane.groups.world.pg for lane in attachment_of(model).engine.pool.shared]
        bagua.detach(model)
        return [not isinstance(pg, LateGloo) or pg._made is not None for pg in groups]

    for first, *others in run_teams(3, work):
        assert first and others and not any(others)


@there
def test_sockets_and_threads_end_with_the_module() -> None:
    def counts() -> tuple[int, int]:
        links = [os.readlink(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd") if _is_there(name)]
        return sum(link.startswith("socket:") for link in links), threading.active_count()

    def _is_there(name: str) -> bool:
        return os.path.lexists(f"/proc/self/fd/{name}")

    run_teams(2, train, "native", "int4", 1)
    before = counts()
    for _ in range(2):
        run_teams(2, train, "native", "int4", 1)
    after = counts()
    assert after[0] <= before[0] and after[1] <= before[1]


@there
def test_a_rank_that_leaves_is_named_and_all_others_fail_too() -> None:
    failed: dict[int, str] = {}

    def work(team: Team) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        bagua.distribute(model, optimizer, "bytegrad", process_group=team, transport="native")
        try:
            for step in range(3):
                if step == 1 and team.rank == 2:
                    attachment_of(model).engine.failures.give_up()  # as at its end: closes the connections
                    return
                model(torch.randn(4, 40)).square().mean().backward()
                optimizer.step()
        except bagua.CommunicationError as error:
            failed[team.rank] = str(error)
        finally:
            bagua.detach(model)

    run_teams(3, work)
    assert sorted(failed) == [0, 1]
    assert all("no response from rank 2" in text and "minmax_uint8" in text for text in failed.values()), failed


def die_in_step(victim: int, system: str) -> str:
    """On a rank: what its training ended with."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    algorithm, options = SYSTEMS[system]
    bagua.distribute(model, optimizer, algorithm, transport="native", **options)
    for step in range(100):
        if step == 2 and dist.get_rank() == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            model(torch.randn(4, 40)).square().mean().backward()
            optimizer.step()
        except bagua.CommunicationError as error:
            return str(error)
    return "nothing failed"


def train_in_process(system: str, transport: str) -> list[Tensor]:
    """On a rank process: weights in the end."""
    return train(Team.of(None, torch.device("cpu")), transport, system)[0]


@there
@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("system", ["int4", "ring", "shift one"])
def test_a_process_that_is_killed_is_named_by_all_others(pool: RankPool, system: str) -> None:
    found = pool.run(3, die_in_step, 2, system, dies=[2])
    assert all("no response from rank 2" in found[rank] for rank in (0, 1)), found


@there
@pytest.mark.process
def test_processes_train_alike(pool: RankPool) -> None:
    over_gloo = pool.run(2, train_in_process, "int4", "gloo")
    native = pool.run(2, train_in_process, "int4", "native")
    for first, second in zip(over_gloo, native, strict=True):
        assert all(map(torch.equal, first, second))


def test_bad_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BAGUA_TRANSPORT", raising=False)
    assert chosen_transport(None) is None and chosen_transport("native") == "native"
    with pytest.raises(ValueError, match=r"transport: expected one of 'gloo', 'native', got 'tcp'"):
        chosen_transport("tcp")
    monkeypatch.setenv("BAGUA_TRANSPORT", "native")
    assert chosen_transport(None) == "native" and chosen_transport("gloo") == "gloo"
    monkeypatch.setenv("BAGUA_TRANSPORT", "mpi")
    with pytest.raises(ValueError, match=r"BAGUA_TRANSPORT: expected .* got 'mpi'"):
        chosen_transport(None)


def test_where_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(team: Team, device: str) -> str:
        return str(why_no_transport("native", team, torch.device(device)))

    team = Team(0, 2, None, Team.alone().timeout)
    assert "CPU tensors" in why(team, "cuda")
    team.backend = "nccl"
    assert "not for cuda tensors over nccl" in why(team, "cuda")
    team.backend = "gloo"
    monkeypatch.setattr("bagua.comm.transport.why_no_mesh", lambda: "_mesh.so was not built")
    assert '"native" here: _mesh.so was not built' in why(team, "cpu")
    assert why_no_transport("gloo", team, torch.device("cuda")) is None
    assert why_no_transport("native", Team.alone(), torch.device("cuda")) is None  # a single rank sends nothing


def test_without_the_library_all_ranks_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setattr(mesh, "LIBRARY", tmp_path / "_mesh.so")
    mesh._load.cache_clear()
    try:
        with pytest.raises(AssertionError) as failed:
            run_teams(2, train, "native", "bytegrad")
        assert str(failed.value).count('ValueError: transport: there is no "native" here: _mesh.so was not built') == 2
        with pytest.raises(RuntimeError, match="was not built"):
            Mesh(0, [-1], 1.0)
    finally:
        mesh._load.cache_clear()


def test_ranks_must_choose_alike() -> None:
    def work(team: Team) -> None:
        train(team, "native" if team.rank else "gloo", "bytegrad")

    with pytest.raises(AssertionError, match="transport differs: rank 1 has native, rank 0 has gloo"):
        run_teams(2, work)


@pytest.mark.parametrize(
    ("tolerates", "round_trip_s", "num_lanes", "sums"),
    [
        ("gloo", 0.04, 4, None),  # they open no more lanes where ranks are far away, and keep all for sums
        ("gloo", 0.001, 4, NEAR_LANES_OF_SUMS),
        (None, 0.04, FAR_LANES, FAR_LANES_OF_SUMS),
        (None, 0.001, 4, NEAR_LANES_OF_SUMS),
    ],
)
def test_lanes_of_sums_where_ranks_may_be_lost(
    tolerates: str | None, round_trip_s: float, num_lanes: int, sums: int | None
) -> None:
    request = Request(1 << 20, 4, None, False, False, True, chooses_lanes=True, tolerates_over=tolerates)
    links = Links(round_trip_s=round_trip_s, slow=True)
    assert request.config(num_lanes, links, False, 3, native=True).lanes_of_sums == sums

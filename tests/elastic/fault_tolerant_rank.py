"""Ranks in processes of their own, each with the agent of its host, that train until they are killed or done."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import multiprocessing as mp
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

import bagua
from bagua.engine import api
from bagua.engine.context import EngineContext
from bagua.engine.hooks import attachments
from bagua.engine.recovery.catch_up import kept_tensors
from bagua.errors import CommunicationError
from bagua.membership import Agent, Epoch, Member, Options, Record
from bagua.membership.seat import LocalSeat, payload_of
from bagua.membership.transport import Transport
from tests.elastic.nccl_stand_in import prepare_nccl
from tests.fork_server import ForkServer

__all__ = ["Job", "digest", "make_model", "make_optimizer", "open_seat", "start_job"]

LIMIT_S = 120.0
TOKEN = b"sixteen bytes or more"
Line = dict[str, Any]


def digest(module: torch.nn.Module) -> str:
    """Of the weights."""
    return hashlib.sha256(b"".join(p.detach().cpu().numpy().tobytes() for p in module.parameters())).hexdigest()


def weights(module: torch.nn.Module) -> list[float]:
    """All of them."""
    return torch.cat([p.detach().view(-1) for p in module.parameters()]).tolist()


def rounds_of(module: torch.nn.Module) -> int:
    """Of averaging in the background, since the members changed last."""
    series = bagua.stats(module).extra.get("round_s")
    return 0 if series is None else series.count


def make_model() -> torch.nn.Module:
    """The same weights everywhere."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.Linear(64, 3)]
    return torch.nn.Sequential(*layers)


def make_optimizer(algorithm: str | bagua.Algorithm, model: torch.nn.Module) -> torch.optim.Optimizer:
    """The one that the algorithm needs, past its warm-up before a rank is lost."""
    if algorithm == "qadam":
        return bagua.optim.QAdam(model.parameters(), lr=1e-3, warmup_steps=5)
    if algorithm == "one_bit_lamb":
        return bagua.optim.OneBitLamb(model.parameters(), lr=1e-3, warmup_steps=5)
    if algorithm == "zero_one_adam":  # from step 14 on intervals of 4 steps, which end after steps 17, 21, ...
        return bagua.optim.ZeroOneAdam(
            model.parameters(), lr=1e-3, var_freeze_step=5, local_step_scaler=4, local_step_clipper=4
        )
    if getattr(algorithm, "name", "") == "dion":
        return torch.optim.SGD(model.parameters(), lr=1e-2)
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def outer_digest(module: torch.nn.Module) -> str:
    """Of what the algorithm keeps when the members change and all ranks hold alike: not of residuals, nor of what it
    takes from this rank's own Adam.
    """
    kept = kept_tensors(attachments[module].engine)
    own = ("residual", "second_moment", "adam_steps")
    alike = [each for (name, _), each in kept.items() if name not in own]
    return hashlib.sha256(b"".join(each.cpu().numpy().tobytes() for each in alike)).hexdigest()


def watch_commit(pipe: Connection, place: int, step: int, point: str, action: str) -> None:
    """At the end of step `step` this rank dies or holds: "launched", "exchanged" or "committed" its exchange."""
    original = EngineContext.commit

    def act() -> None:
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.send({"holds": place})
        pipe.recv()

    def commit(self: EngineContext) -> None:
        if self.step != step:
            return original(self)
        EngineContext.commit = original  # once
        if point == "launched":
            act()
        if point == "exchanged":
            self.wait()
            act()
        original(self)
        if point == "committed":
            act()
        return None

    EngineContext.commit = commit


def replicas(model: torch.nn.Module) -> Line:
    """What the exchanges of a gossip algorithm remember, by bucket and part: of this rank, and of each peer."""
    engine = attachments[model].engine
    engine.dispatcher.wait()
    kept: Line = {"rank": engine.team.rank, "size": engine.team.size, "me": {}, "peers": {}}
    for (_, bucket, part), state in engine.memory.states.items():
        for name, value in state.items():
            kept.setdefault(name, {})[f"{bucket}/{part}"] = value.tolist()
    return kept


def die_in_exchange(model: torch.nn.Module) -> None:
    """Kill this process in its next exchange of weights, when two of the buckets are through."""
    engine = attachments[model].engine
    assert len(engine.buckets) > 2
    launch = engine.context.launch

    def launch_and_die(exchange: Any, bucket: Any, *args: Any, **options: Any) -> Any:
        ticket = launch(exchange, bucket, *args, **options)
        if bucket.index == 1:
            ticket.wait()
            os.kill(os.getpid(), signal.SIGKILL)
        return ticket

    engine.context.launch = launch_and_die


def break_exchange(model: torch.nn.Module) -> None:
    """The next exchange fails on this rank, by a defect of its own."""
    lane = attachments[model].engine.pool.shared[0]
    submit = lane.submit

    def defect() -> None:
        raise TypeError("a defect")

    lane.submit = lambda run, label: submit(defect, label)


def die_in_distribute(point: str) -> None:
    """Kill this process when `bagua.distribute` comes to a function that it calls, or returns from it ("after ...")."""
    after, name = point.startswith("after "), point.removeprefix("after ")
    original = getattr(api, name)

    def die(*args: Any, **options: Any) -> Any:
        if after:
            original(*args, **options)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(api, name, die)


def run_rank(pipe: Connection, job: Line) -> None:
    """Train, and tell the test of each step."""
    try:
        job["train"](pipe, job)
    except BaseException:
        pipe.send({"error": traceback.format_exc()})


def open_seat(pipe: Connection, job: Line) -> tuple[LocalSeat, Any]:
    """The agent of this rank's host, and the store that it serves."""
    logging.getLogger("bagua").setLevel(logging.ERROR)
    place = job["place"]
    listener, store = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
    mine = [f"127.0.0.1:{each.getsockname()[1]}" for each in (listener, store)]
    pipe.send({"loaded": mine, "pid": os.getpid()})
    addresses = pipe.recv()  # so agents start at about the same time
    port = store.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=store.detach(),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    members = [Member(f"n{i}", 0, agent, payload_of(meet)) for i, (agent, meet) in enumerate(addresses)]
    arrives = place >= len(members)  # to a job that is running
    agent = Agent(
        Record("job", f"n{place}", 0, mine[0]),
        Options(job["detect_s"], job["max_wait_s"]),
        time.monotonic(),
        epoch=None if arrives else Epoch.first(members, tie_break=job["tie_break"]),
        contacts=[member.address for member in members] if arrives else [],
        payload=payload_of(mine[1]),
        seed=place,
    )
    torch.set_num_threads(1)
    return LocalSeat(Transport(agent, listener, TOKEN)), server


def train_steps(pipe: Connection, job: Line) -> None:
    """Train until so many steps count, and tell the test of each."""
    seat, server = open_seat(pipe, job)
    place = job["place"]
    arrives = place >= job["size"]
    device = torch.device(job["device"])
    if job["backend"] == "nccl":
        prepare_nccl(device, place)
    model = make_model().to(device)
    optimizer = make_optimizer(job["algorithm"], model)
    if job["lr"] is not None:
        optimizer.param_groups[0]["lr"] = job["lr"]
    options = {**job["options"], **(job["options_of_arrival"] if arrives else {})}
    os.environ["BAGUA_SITE"] = options.pop("site", "")
    tolerance = bagua.FaultTolerance(seat=seat, max_blocked_s=90.0, backend=job["backend"])
    if job["at_commit"] is not None and job["at_commit"][0] == place:
        watch_commit(pipe, *job["at_commit"])
    if job["dies_in_distribute"] is not None:
        torch.manual_seed(place)
        with torch.no_grad():
            for param in model.parameters():
                param.normal_()
        pipe.send({"own": digest(model)})
        if job["dies_in_distribute"][0] == place:
            die_in_distribute(job["dies_in_distribute"][1])
        while place in job["late_in_distribute"] and ((view := seat.view()) is None or view.epoch == 1):
            time.sleep(0.01)
    bagua.distribute(
        model, optimizer, job["algorithm"], fault_tolerant=tolerance, bucket_bytes=job["bucket_bytes"], **options
    )
    generator = torch.Generator().manual_seed(place)
    target = job["pull"] * (-1) ** place
    pipe.send({"begins": bagua.stats(model).steps, "digest": digest(model)})
    for attempt in itertools.count():
        stats = bagua.stats(model)
        if len(stats.membership) >= job["changes"][place]:  # the same on all ranks: members change between two steps
            last = stats.membership[-1].step if stats.membership else 0
            interval, offset = job["interval"]  # within an interval the ranks may be at different steps
            if rounds_of(model) >= job["rounds"] and stats.steps >= last - (last - offset) % interval + job["steps"]:
                if not job["until_told"] or pipe.poll():
                    break
                pipe.send({"enough": place})
        x = torch.randn(8, 20, generator=generator).to(device)
        if [place, attempt] == job["holds_at"]:
            pipe.send({"holds": attempt})
            pipe.recv()
        if [place, attempt] == job["dies_in_exchange"]:
            die_in_exchange(model)
        if [place, attempt] == job["breaks_at"]:
            break_exchange(model)
        output = model(x)
        entered = digest(model)  # after groups were opened, if they were
        if job["fails_at"]:
            pipe.send({"enters": attempt})
        (output - target).square().mean().backward()
        if [place, attempt] == job["fails_at"]:  # its last exchange, although it has ended well for the others
            pipe.send({"holds": attempt})
            pipe.recv()
            attachments[model].engine.failures.lose_step(CommunicationError("a test"))
        if [place, attempt] == job["dies_in_step"]:
            optimizer.register_step_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        optimizer.step()
        applied = any(p.grad is not None for p in model.parameters())
        optimizer.zero_grad()
        steps = bagua.stats(model).steps
        line = {"attempt": attempt, "steps": steps, "applied": applied, "entered": entered, "digest": digest(model)}
        recovery = attachments[model].engine.failures.recovery
        line |= {"rounds": rounds_of(model), "changes": len(bagua.stats(model).membership)}
        pipe.send({**line, "opening": recovery is not None and recovery.opening is not None})
        time.sleep(job["pause_s"])
    if job["averages"]:
        bagua.average_parameters(model)
    stats = bagua.stats(model)
    states = [optimizer.state[p] for p in model.parameters()]
    moments = [state["exp_avg_sq"].sum().item() for state in states if "exp_avg_sq" in state]
    changes = [{"lost": c.lost, "joined": c.joined, "step": c.step, "skipped": c.skipped} for c in stats.membership]
    pipe.send(
        {
            "ended": place,
            "steps": stats.steps,
            "digest": digest(model),
            "moments": moments,
            "changes": changes,
            "outer": outer_digest(model),
            **({"replicas": replicas(model), "weights": weights(model)} if job["gossip"] else {}),
        }
    )
    pipe.recv()  # the agent's vote may be needed until all have ended
    if job["until_told"]:
        pipe.recv()
    bagua.detach(model)
    seat.close()
    del server


class Job:
    """Ranks that train.

    Attributes:
        lines: what each has told so far.
        options: of the algorithm and of `distribute`.
    """

    def __init__(self, server: ForkServer, size: int, job: Line) -> None:
        self._server, self._job, self._size = server, job, size
        self.options: dict[str, Any] = job["options"]
        self.lines: list[list[Line]] = []
        self._pipes: list[Connection] = []
        for place in range(size):
            self._fork(place)
        self.wait_for(list(range(size)), lambda line: "loaded" in line, "start")
        self._founders = [lines[0]["loaded"] for lines in self.lines]
        for pipe in self._pipes:
            pipe.send(self._founders)

    def _fork(self, place: int) -> None:
        job = {"place": place, "size": self._size, **self._job}
        if self._job["device"] == "cpu":
            self._pipes.append(self._server.fork(run_rank, job))
        else:  # CUDA does not stand a fork
            ours, theirs = mp.Pipe()
            mp.get_context("spawn").Process(target=run_rank, args=(theirs, job), daemon=True).start()
            theirs.close()
            self._pipes.append(ours)
        self.lines.append([])

    def arrive(self) -> int:
        """Start a rank that joins the founders; returns its place."""
        place = len(self._pipes)
        self._fork(place)
        self.wait_for([place], lambda line: "loaded" in line, "start")
        self._pipes[place].send(self._founders)
        return place

    def wait_for(self, places: list[int], found: Callable[[Line], bool], what: str) -> None:
        """Return when each of `places` has told something for which `found` is true."""
        deadline = time.monotonic() + LIMIT_S
        while missing := [place for place in places if not any(map(found, self.lines[place]))]:
            ready = wait([self._pipes[place] for place in missing], max(deadline - time.monotonic(), 0.0))
            assert ready, f"no {what} of {missing} within {LIMIT_S} s: {[lines[-1:] for lines in self.lines]}"
            for place in missing:
                if self._pipes[place] in ready:
                    try:
                        self.lines[place].append(self._pipes[place].recv())
                    except EOFError:
                        raise AssertionError(f"no {what}, rank {place} has ended: {self.lines[place][-1:]}") from None

    def signal_at(self, place: int, attempt: int, number: signal.Signals) -> None:
        """Send a signal to a rank once it has made so many steps."""
        self.wait_for([place], lambda line: line.get("attempt", -1) >= attempt, f"step {attempt}")
        os.kill(self.lines[place][0]["pid"], number)

    def resume(self, place: int) -> None:
        """Let a rank that was stopped go on."""
        os.kill(self.lines[place][0]["pid"], signal.SIGCONT)

    def kill(self, place: int) -> None:
        """End a rank."""
        os.kill(self.lines[place][0]["pid"], signal.SIGKILL)

    def go_on(self, place: int) -> None:
        """Let a rank that holds go on."""
        self._pipes[place].send("go on")

    def ends(self, places: list[int]) -> list[Line]:
        """What these ranks tell when all have trained."""
        if self._job["until_told"]:
            self.wait_for(places, lambda line: "enough" in line, "enough rounds")
            for place in places:
                self.go_on(place)
        self.wait_for(places, lambda line: "ended" in line, "end")
        for place in places:
            self._pipes[place].send("end")
        return [next(line for line in self.lines[place] if "ended" in line) for place in places]

    def read_rest(self) -> None:
        """Read what ranks have told before they were lost."""
        for lines, pipe in zip(self.lines, self._pipes, strict=True):
            with contextlib.suppress(EOFError):
                while pipe.poll():
                    lines.append(pipe.recv())

    def close(self) -> None:
        """Kill those that are left."""
        for lines in self.lines:
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(lines[0]["pid"], signal.SIGKILL)
        for pipe in self._pipes:
            pipe.close()


@contextmanager
def start_job(server: ForkServer, size: int, **job: Any) -> Iterator[Job]:
    """Ranks that train. At the end those that are left are killed.

    Args:
        job: `train`: what each rank runs; `changes`: how often the members change, as each place sees it, before it
            ends; `steps`: that are made after the last change, from the beginning of an `interval` (length, first end)
            of local steps on; `rounds`: of averaging in the background to be made after it; `until_told`: all train on
            until each has that; `at_commit`: arguments of `watch_commit`; `dies_in_step`, `dies_in_exchange`,
            `breaks_at`, `holds_at`: place and attempt; `dies_in_distribute`: place and argument of
            `die_in_distribute`, and ranks begin with weights of their own; `late_in_distribute`: places that call it
            when a rank is lost; `lr`: of the optimizer; `pull`: outputs are drawn there, or away at odd places;
            `gossip`: tell weights and replicas at the end; `averages`: take the mean of the replicas then; `device`,
            `backend`: of the exchanges, see `prepare_nccl`; `workers`: of the data loader; others as in `Job`.
    """
    given = {
        "train": train_steps,
        "steps": 15,
        "detect_s": 60.0,
        "max_wait_s": math.inf,
        "tie_break": False,
        "options": {},
        "pause_s": 0.01,
        "fails_at": None,
        "interval": [1, 0],
        "at_commit": None,
        "dies_in_step": None,
        "dies_in_exchange": None,
        "breaks_at": None,
        "dies_in_distribute": None,
        "late_in_distribute": [],
        "holds_at": None,
        "pull": 0.0,
        "gossip": False,
        "averages": False,
        "bucket_bytes": None,
        "lr": None,
        "device": "cpu",
        "backend": "gloo",
        "rounds": 0,
        "until_told": False,
        "workers": 0,
        **job,
    }
    given.setdefault("options_of_arrival", {})
    started = Job(server, size, given)
    try:
        yield started
    finally:
        started.close()

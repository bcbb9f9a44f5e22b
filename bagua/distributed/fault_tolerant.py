"""`bagua run --fault-tolerant`: a launcher whose host takes part in the membership of the job.

Each host has an agent (`bagua.membership`), a store and its ranks. When a rank or a host is lost, the others agree on
who is left, and their ranks go on in the same processes. Design: docs/design/0008-membership.md.
"""

from __future__ import annotations

import math
import os
import secrets
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
from torch.distributed.run import determine_local_world_size

from bagua.distributed.failover import parse_endpoints
from bagua.distributed.fork_server import ForkServer
from bagua.distributed.founding import Founding, Job, JoinError, token_of_the_user
from bagua.distributed.host_supervisor import HostSupervisor
from bagua.distributed.job_store import ServedStore
from bagua.distributed.node_counts import parse_nnodes
from bagua.distributed.rank_command import rank_command
from bagua.distributed.rank_process import Start, spawn
from bagua.membership import Agent, Epoch, Member, Options, Record
from bagua.membership.messages import MAX_SEATS
from bagua.membership.seat import payload_of
from bagua.membership.transport import Transport
from bagua.status.host_status import HostStatus
from bagua.status.rank_status import STATUS

__all__ = ["JoinError", "Settings", "run"]

_JOIN_S = 600.0  # torch's defaults
_LAST_CALL_S = 30.0
_NAME = 40  # characters of the host name in the name of an agent
# Flags of torchrun that this launcher has nothing for yet, with their defaults.
_REFUSED = {
    "standalone": False,
    "redirects": "0",
    "tee": "0",
    "log_dir": None,
    "run_path": False,
    "local_addr": None,
    "start_method": "spawn",
}


@dataclass(frozen=True)
class Settings:
    """What the flags say.

    Raises (by `of`):
        ValueError: names the flag that cannot be had.
    """

    endpoints: list[tuple[str, int]]
    sizes: tuple[int, int]
    run_id: str
    options: Options
    max_restarts: int
    join_s: float
    last_call_s: float
    token: bytes | None
    commands: list[list[str]]  # by local rank
    script: str

    @classmethod
    def of(cls, args: Namespace) -> Settings:
        """Those of the parsed flags of `bagua run`."""
        ranks = determine_local_world_size(args.nproc_per_node)
        if not 0 < ranks <= MAX_SEATS:
            raise ValueError(
                f"--nproc-per-node {args.nproc_per_node}: 1 to {MAX_SEATS} with --fault-tolerant, not {ranks}"
            )
        for name, default in _REFUSED.items():
            if getattr(args, name, default) not in (default, None):
                raise ValueError(f"--{name.replace('_', '-')} cannot be used with --fault-tolerant yet")
        if args.rdzv_backend not in ("static", "c10d"):
            raise ValueError(f"--rdzv-backend {args.rdzv_backend}: --fault-tolerant has a rendezvous of its own")
        fewest, most = parse_nnodes(args.nnodes)
        if not args.rdzv_endpoint and most > 1:
            raise ValueError("--fault-tolerant needs --rdzv-endpoint HOST:PORT,HOST:PORT,... with the hosts of the job")
        config = _parse_rendezvous_config(args.rdzv_conf)
        return cls(
            endpoints=parse_endpoints(args.rdzv_endpoint) if args.rdzv_endpoint else [("127.0.0.1", 0)],
            sizes=(fewest, most),
            run_id=args.rdzv_id,
            options=_options(args),
            max_restarts=args.max_restarts,
            join_s=_seconds("join_timeout", config.get("join_timeout"), _JOIN_S),
            last_call_s=_seconds("last_call_timeout", config.get("last_call_timeout"), _LAST_CALL_S),
            token=token_of_the_user(),
            commands=[rank_command(args, local) for local in range(ranks)],
            script=args.training_script,
        )


def run(settings: Settings, prog: str, directory: Path, forks: ForkServer | None = None) -> None:
    """Take part in the job with the ranks of this host until it ends.

    Args:
        settings: of this host.
        prog: what was called, for lines of the log.
        directory: of its own, see `run_directory`.
        forks: forks the ranks; None: they are started as processes of their own.

    Raises:
        JoinError: the job was neither founded nor found.
        ChildFailedError: a rank has failed for good.
        SignalException: a signal has ended the host.
    """

    def say(text: str) -> None:
        print(f"{prog}: {text}", file=sys.stderr, flush=True)

    try:
        served = ServedStore(settings.endpoints)
        family = socket.AF_INET6 if ":" in served.host else socket.AF_INET
        listener = socket.create_server((served.host, 0), family=family, backlog=1024)
    except OSError as error:
        raise JoinError(f"--rdzv-endpoint: no store can be served for the job: {error}") from None
    try:
        address, ranks = f"{served.host}:{listener.getsockname()[1]}", len(settings.commands)
        payload = payload_of(served.address, ranks)
        me = Member(_new_name(), 0, address, payload, seats=tuple(range(ranks)))
        founding = Founding(
            served,
            settings.endpoints,
            me,
            settings.sizes,
            settings.run_id,
            settings.last_call_s,
            settings.token,
        )
        job = founding.join(settings.join_s, say)
        say(f"this host is {me.name}, {'a founder of' if job.founder else 'a newcomer to'} job {job.note.job}")
        transport = _start_agent(job, me, settings.options, listener)
        observed = socket.create_server((served.host, 0), family=family)
    except BaseException:
        listener.close()
        raise
    supervisor = HostSupervisor(
        job,
        served,
        transport,
        directory,
        [_start_of(command, forks) for command in settings.commands],
        settings.script,
        settings.max_restarts,
        settings.join_s,
        say,
    )
    status = HostStatus(directory, supervisor.describe, observed, job.token)
    host = served.address.rpartition(":")[0]
    served.note_status(f"{host}:{observed.getsockname()[1]}")
    os.environ[STATUS] = str(status.ranks)
    try:
        supervisor.run()
    finally:
        status.close()


def _start_of(command: Sequence[str], forks: ForkServer | None) -> Start:
    """What starts this rank. If the process that forks ranks is lost, it is as without one."""
    return lambda env: (forks and forks.start(command, env)) or spawn(command, env)


def _start_agent(job: Job, me: Member, options: Options, listener: socket.socket) -> Transport:
    epoch: Epoch | None = job.note.founders if job.founder else None
    agent = Agent(
        Record(job.note.job, me.name, me.incarnation, me.address),
        options,
        time.monotonic(),
        epoch=epoch,
        contacts=job.note.contacts,
        payload=me.payload,
        seats=me.seats if job.founder else (),
        seed=secrets.randbits(32),
    )
    return Transport(agent, listener, job.token)


def _new_name() -> str:
    """A launcher that is started again has forgotten its promises, so it needs another name (`Member.name`)."""
    host = "".join(each if each.isascii() and each.isalnum() else "-" for each in socket.gethostname())
    return f"{host[:_NAME]}.{secrets.token_hex(3)}"


def _options(args: Namespace) -> Options:
    detect_s = Options().detect_s if args.detect_s is None else args.detect_s
    max_wait_s = math.inf if args.max_wait_s is None else args.max_wait_s
    try:
        return Options(detect_s=detect_s, max_wait_s=max_wait_s)
    except ValueError as error:
        flag = "--max-wait-s" if str(error).startswith("max_wait_s") else "--detect-s"
        raise ValueError(f"{flag}: {error}") from None


def _seconds(name: str, text: str | None, default: float) -> float:
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ValueError(f"--rdzv-conf {name}={text}: expected a number of seconds")
    return value

"""Run torchrun's launch on parsed arguments; returns an exit code and prints a summary of failures."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack, closing, nullcontext
from functools import partial

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record
from torch.distributed.elastic.rendezvous import RendezvousConnectionError
from torch.distributed.run import determine_local_world_size, run

from bagua.distributed import failover, fault_tolerant
from bagua.distributed.failures import FirstFailure
from bagua.distributed.fork_server import ForkServer
from bagua.distributed.forked_workers import forked_workers
from bagua.distributed.meeting import FAILURES, Meeting, MeetingError
from bagua.distributed.node_counts import parse_nnodes
from bagua.distributed.rank_command import check_preload, rank_command
from bagua.distributed.run_directory import run_directory
from bagua.distributed.run_status import serve_status
from bagua.distributed.waiting import end_while_waiting
from bagua.elastic import memory
from bagua.own_address import address_towards, is_loopback, name_problem
from bagua.signals import end_by_exception
from bagua.status.rank_status import STATUS

__all__ = ["start"]

_STORES_LOST = 3  # how often the store may be lost while an agent sets out, before its launcher gives up


def start(args: Namespace, prog: str) -> int:
    """Launch what `args` describe and wait for it.

    Returns:
        0 when all ranks exited with 0, 2 for a wrong flag, 128 + n when signal n ended the launch, else 1. With
        `--fault-tolerant`: the exit code of the rank, 128 + n if signal n killed it.
    """
    with ExitStack() as kept:
        # Before anything else: what is forked later could have threads, and could have asked CUDA for its devices.
        try:
            forks = kept.enter_context(closing(ForkServer(partial(_say, prog)))) if args.preload else None
        except ValueError as error:
            print(f"{prog}: --preload: {error}", file=sys.stderr)
            return 2
        return _start(args, prog, kept, forks)


def _start(args: Namespace, prog: str, kept: ExitStack, forks: ForkServer | None) -> int:
    _keep_nohup(args)
    _silence_numpy()
    tolerant: fault_tolerant.Settings | None = None
    meeting: Meeting | None = None
    try:
        num_ranks = _num_ranks(args)
        if args.max_restarts < 0:
            raise ValueError(f"--max-restarts {args.max_restarts}: must not be negative")
        if args.preload:
            check_preload(args)
        if args.fault_tolerant:
            tolerant = fault_tolerant.Settings.of(args)
        else:
            _elect(args)
            meeting = Meeting.of(args)
            _check_node_rank(args)
        _make_log_dir(args)
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    fewest, most = parse_nnodes(args.nnodes)
    if tolerant is not None or args.max_restarts or fewest != most:
        # Shared with the launcher's own store, a restarted gloo group finds the addresses of the attempt before
        # it. A store of its own listens on a port that was free a moment ago: not where there is one attempt.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    _set_threads(num_ranks, prog)
    nested = "TORCHELASTIC_ERROR_FILE" in os.environ
    if forks is not None:
        try:
            forks.preload(args.preload, rank_command(args, 0), os.environ)
        except ValueError as error:
            print(f"{prog}: --preload: {error}", file=sys.stderr)
            return 2
    os.environ.pop(STATUS, None)  # of a launcher that has started this one
    if tolerant is None:
        launch = partial(_run, args, meeting, partial(_say, prog))
        kept.enter_context(serve_status(args, prog))
        if forks is not None:
            kept.enter_context(forked_workers(forks))
    else:
        # Tracebacks are there, which `record` reads after the end of the ranks.
        launch = partial(fault_tolerant.run, tolerant, prog, kept.enter_context(run_directory()), forks)
    held = _hold_memory(num_ranks)
    try:
        # A launcher that was itself launched passes on, through `record`, the failure that came first.
        # A fault-tolerant launcher waits in Python, and takes its time to leave the job.
        with end_by_exception(), end_while_waiting(prog) if tolerant is None else nullcontext():
            (record(launch) if nested else launch)()
    except ChildFailedError as failure:
        print(failure, file=sys.stderr)
        return 1 if tolerant is None else _shell_code(failure)
    except (fault_tolerant.JoinError, MeetingError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
    except SignalException as interrupt:
        number = signal.Signals(interrupt.sigval)
        print(f"{prog}: ended by {number.name}; all ranks of this node have ended", file=sys.stderr)
        return 128 + number
    except KeyboardInterrupt:  # before torchrun has installed its own handlers
        print(f"{prog}: ended by SIGINT; no rank was started", file=sys.stderr)
        return 128 + signal.SIGINT
    finally:
        if held is not None:
            del os.environ[memory.VARIABLE]
            held.close()
    return 0


def _num_ranks(args: Namespace) -> int:
    """Number of ranks on this host.

    Raises:
        ValueError: it is none.
    """
    expected = "expected a number of at least 1, auto, cpu, gpu or xpu"
    try:
        number = determine_local_world_size(args.nproc_per_node)
    except ValueError as error:
        raise ValueError(f"--nproc-per-node {args.nproc_per_node}: {error} ({expected})") from None
    if number < 1:
        raise ValueError(f"--nproc-per-node {args.nproc_per_node}: {number} ranks ({expected})")
    return number


def _check_node_rank(args: Namespace) -> None:
    """Static rendezvous only: others number the nodes themselves.

    Raises:
        ValueError: there is no such node, and the launcher would wait for the others forever.
    """
    _, most = parse_nnodes(args.nnodes)
    if args.rdzv_backend == "static" and not args.standalone and not 0 <= args.node_rank < most:
        raise ValueError(f"--node-rank {args.node_rank}: expected 0 to {most - 1}, as --nnodes is {most}")


def _make_log_dir(args: Namespace) -> None:
    """Make the directory of the ranks' output.

    Raises:
        ValueError: ranks cannot write there.
    """
    if args.log_dir is None:
        return
    try:
        os.makedirs(args.log_dir, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--log-dir {args.log_dir}: cannot be made ({error.strerror})") from None
    if not os.access(args.log_dir, os.W_OK | os.X_OK):
        raise ValueError(f"--log-dir {args.log_dir}: cannot be written to")


def _say(prog: str, text: str) -> None:
    print(f"{prog}: {text}", file=sys.stderr, flush=True)


def _shell_code(failure: ChildFailedError) -> int:
    """Of the one rank of this host; as a shell says it, if it was killed."""
    code = failure.get_first_failure()[1].exitcode
    return 128 - code if code < 0 else code


def _run(args: Namespace, meeting: Meeting | None, say: Callable[[str], None]) -> None:
    if meeting is None:
        return _run_here(args)
    meeting.resolve(say)
    _serve_here(args, meeting)
    with meeting.told(say) as started:
        try:
            _run_here(args)
        except FAILURES as error:
            raise MeetingError(meeting.explain(error, started())) from error


def _serve_here(args: Namespace, meeting: Meeting) -> None:
    """Have the host of the endpoint serve torch's store, also where its own name does not resolve to that address.

    torch compares the endpoint with what the own name resolves to: on Debian and Ubuntu that may be 127.0.1.1, and no
    host would serve.
    """
    if args.rdzv_backend != "c10d":
        return
    problem = name_problem()
    if problem and not args.local_addr:
        own = address_towards(meeting.places[0][0])
        if own is not None and not is_loopback(own):
            args.local_addr = own  # others may be told to find rank 0 there
    serves = meeting.serves_here() if problem else None
    if serves is not None:
        args.rdzv_conf = ",".join([*filter(None, [args.rdzv_conf]), f"is_host={int(serves)}"])


def _run_here(args: Namespace) -> None:
    for left in reversed(range(_STORES_LOST)):
        try:
            return run(args)
        except ChildFailedError as failure:
            raise FirstFailure(failure.name, failure.failures) from None
        except (DistError, RendezvousConnectionError) as error:
            if args.rdzv_backend != failover.BACKEND or not left:
                raise
            print(f"rendezvous: lost the store during the rendezvous ({error}); starting it again", file=sys.stderr)


def _elect(args: Namespace) -> None:
    """With several endpoints of a c10d rendezvous, its store moves when a host is lost.

    Raises:
        ValueError: an endpoint is malformed.
    """
    if args.rdzv_backend == "c10d" and "," in (args.rdzv_endpoint or ""):
        failover.parse_endpoints(args.rdzv_endpoint)
        failover.register()
        args.rdzv_backend = failover.BACKEND


def _keep_nohup(args: Namespace) -> None:
    """A launcher that was started with SIGHUP ignored, by nohup for one, survives the end of its terminal."""
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handled = getattr(args, "signals_to_handle", "").split(",")
        args.signals_to_handle = ",".join(name for name in handled if name != "SIGHUP")


def _silence_numpy() -> None:
    """Without NumPy torch warns at each import, in each rank. What the user has set in PYTHONWARNINGS goes first."""
    if importlib.util.find_spec("numpy") is None:
        given = os.environ.get("PYTHONWARNINGS")
        rule = "ignore:Failed to initialize NumPy:UserWarning"
        if rule not in (given or ""):
            os.environ["PYTHONWARNINGS"] = f"{rule},{given}" if given else rule


def _set_threads(num_ranks: int, prog: str) -> None:
    """torchrun's own default, one thread a rank where there are several, said in one line instead of six."""
    if num_ranks > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        print(f"{prog}: each rank uses one CPU thread; set OMP_NUM_THREADS for more", file=sys.stderr)


def _hold_memory(num_ranks: int) -> memory.Memory | None:
    """Memory for commits of `bagua.elastic`, for the ranks to find; it costs nothing until they write to it."""
    os.environ.pop(memory.VARIABLE, None)
    try:
        held = memory.Memory(num_ranks)
    except (OSError, ValueError) as error:
        print(f"no memory for elastic commits: {error}", file=sys.stderr)
        return None
    os.environ[memory.VARIABLE] = held.address
    return held

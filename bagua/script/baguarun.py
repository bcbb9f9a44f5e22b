"""`baguarun`: one job on several hosts, over ssh.

    baguarun --host_list 10.0.0.1,10.0.0.2 --ssh_port 22 --nproc_per_node 4 train.py --lr 0.1

It starts `bagua run` on each host, in this directory, with this interpreter, as node 0, 1, ... of a job whose master is
the first host. Output comes back line by line. When a host fails, and at Ctrl-C, all are ended. Hosts need a login
without a password, and the same files in the same places.

Differs: from the original, in that it uses the `ssh` program and your ssh configuration; that words of the command and
values of variables never pass through a shell; that `PATH` and `LD_LIBRARY_PATH` are forwarded like any other
variable, with `-x`; and that the ports of ssh and the environment variables are optional.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import REMAINDER, ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence

from bagua.script.connection import NodeSpec, SshOptions
from bagua.script.fan_out import FanOut
from bagua.script.hosts import Host, parse_hosts
from bagua.signals import end_by_exception

__all__ = ["get_args_parser", "main"]

MASTER_PORT = 29500
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def get_args_parser() -> ArgumentParser:
    """The flags of the original, and some more."""
    parser = ArgumentParser(prog="baguarun", description="Start a script on every rank of several hosts, over ssh.")

    def add(name: str, **kw: object) -> None:
        dashed = "--" + name.replace("_", "-")
        parser.add_argument(f"--{name}", *([dashed] if dashed != f"--{name}" else []), **kw)  # pyright: ignore

    add("host_list", metavar="HOSTS", help="[user@]name[:port],... in the order of the nodes; the first is the master "
        "(default: BAGUA_NODE_DOMAIN_NAMES)")  # fmt: skip
    add("ssh_port", type=_port, metavar="PORT", help="of hosts that name none (default: BAGUA_SSH_PORT, or ssh's)")
    add("nproc_per_node", type=_count, required=True, metavar="N", help='ranks on each host: a number, "gpu" or "auto"')
    add("master_addr", help="address of the first host for the others (default: its name in the list)")
    add("master_port", type=_port, metavar="PORT", default=MASTER_PORT, help="free on the first host (%(default)s)")
    parser.add_argument("-x", dest="variables", action="append", default=[], metavar="NAME[=VALUE]",
                        help="set a variable for the ranks; the value is the one here; may be repeated")  # fmt: skip
    add("no_python", action="store_true", help="TRAINING_SCRIPT is a program of its own")
    add("enable_bagua_net", action="store_true", help="have NCCL load Bagua-Net")
    add(
        "bagua_service_port", type=_port, metavar="PORT", help="accepted, without effect: Bagua no longer runs a server"
    )
    add("workdir", metavar="DIR", help="directory on the hosts (default: the path of this one)")
    add("python", default=sys.executable, help="interpreter on the hosts (default: the path of this one, %(default)s)")
    group = parser.add_argument_group("ssh")
    group.add_argument("-F", "--ssh_config", "--ssh-config", metavar="FILE", help="configuration instead of yours")
    group.add_argument("-i", "--identity", metavar="FILE", help="private key")
    group.add_argument("--connect_timeout", "--connect-timeout", type=_seconds, default=10, metavar="S",
                       help="for a connection, seconds (%(default)s)")  # fmt: skip
    group.add_argument("--grace", type=_seconds, default=15, metavar="S",
                       help="from SIGTERM to SIGKILL when ranks have to end, seconds (%(default)s)")  # fmt: skip
    parser.add_argument("training_script", metavar="TRAINING_SCRIPT", help="started on every rank")
    parser.add_argument("training_script_args", metavar="...", nargs=REMAINDER, help="its own arguments")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job.

    Returns:
        0; the exit code of the host that failed first; 1 where a host could not be reached; 130 after Ctrl-C, 143 after
        SIGTERM. Wrong arguments end the program with 2.
    """
    parser = get_args_parser()
    args = parser.parse_args(argv)
    try:
        hosts = _hosts(args)
        env = _environment(args.variables)
        master = _master(args, hosts)
    except ValueError as error:
        parser.error(str(error))
    ssh = shutil.which("ssh")
    if ssh is None:
        print("baguarun: ssh is not installed; install the OpenSSH client", file=sys.stderr)
        return 1
    if args.bagua_service_port is not None:
        print("baguarun: --bagua_service_port has no effect: Bagua no longer runs a server", file=sys.stderr)
    cwd = args.workdir or os.getcwd()
    specs = [
        NodeSpec(_launcher(args, rank, len(hosts), master), cwd, env, args.python, args.grace)
        for rank in range(len(hosts))
    ]
    options = SshOptions(ssh, args.ssh_config, args.identity, args.connect_timeout)
    try:
        with end_by_exception():
            return FanOut(hosts, specs, options).run()
    except KeyboardInterrupt:
        print("baguarun: interrupted; all hosts were told to stop", file=sys.stderr)
        return 130


def _hosts(args: Namespace) -> list[Host]:
    text = args.host_list or os.environ.get("BAGUA_NODE_DOMAIN_NAMES")
    if not text:
        raise ValueError("--host_list or BAGUA_NODE_DOMAIN_NAMES must name the hosts")
    port = args.ssh_port
    if port is None and os.environ.get("BAGUA_SSH_PORT"):
        try:
            port = _port(os.environ["BAGUA_SSH_PORT"])
        except ArgumentTypeError as error:
            raise ValueError(f"BAGUA_SSH_PORT {error}") from None
    return parse_hosts(text, port)


def _environment(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that `-x` names.

    Raises:
        ValueError: a name is none, or it has no value here.
    """
    env: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not _VARIABLE.match(name):
            raise ValueError(f"-x {word}: {name!r} is not a variable name")
        if not equals and name not in os.environ:
            raise ValueError(f"-x {name}: it is not set here; -x {name}=VALUE sets it")
        env[name] = value if equals else os.environ[name]
    return env


def _master(args: Namespace, hosts: list[Host]) -> str:
    address = args.master_addr or hosts[0].name
    if Host("", address, None).is_loopback and not all(host.is_loopback for host in hosts):
        raise ValueError(f"--master_addr: other hosts cannot reach {address}; give an address that they can")
    return address


def _launcher(args: Namespace, rank: int, size: int, master: str) -> list[str]:
    words = [args.python, "-u", "-m", "bagua.distributed.run", "--nnodes", str(size), "--node-rank", str(rank)]
    words += ["--nproc-per-node", args.nproc_per_node, "--master-addr", master, "--master-port", str(args.master_port)]
    words += ["--max-restarts", "0"]  # hosts that restart on their own do not meet again
    words += ["--no-python"] if args.no_python else []
    words += ["--enable-bagua-net"] if args.enable_bagua_net else []
    return [*words, args.training_script, *args.training_script_args]


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535):
        raise ArgumentTypeError(f"must be a number from 1 to 65535, not {text!r}")
    return int(text)


def _count(text: str) -> str:
    if text not in ("auto", "gpu", "cpu") and not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ArgumentTypeError(f'must be a number of ranks, "gpu", "cpu" or "auto", not {text!r}')
    return text


def _seconds(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 86400):
        raise ArgumentTypeError(f"must be a whole number of seconds from 1 to 86400, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

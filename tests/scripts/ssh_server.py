"""An ssh server of the tests' own on loopback: own keys, own configuration, a free port, this user only."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from tests.ports import free_port

PRIVILEGE_SEPARATION = Path("/run/sshd")  # made by the service's start otherwise; sshd wants it when root runs it
NAMES = ("127.0.0.1", "localhost")


def missing() -> str | None:
    """Why there can be no server here."""
    for program in ("ssh", "sshd", "ssh-keygen"):
        if find(program) is None:
            return f"no {program} on this machine"
    if os.geteuid() == 0:
        with contextlib.suppress(OSError):
            PRIVILEGE_SEPARATION.mkdir(mode=0o755, exist_ok=True)
        if not PRIVILEGE_SEPARATION.is_dir():
            return f"sshd needs {PRIVILEGE_SEPARATION}, which cannot be made"
    return None


def find(program: str) -> str | None:
    return shutil.which(program) or shutil.which(program, path="/usr/sbin:/usr/local/sbin:/sbin")


@dataclass
class SshServer:
    """A running sshd.

    Attributes:
        port: on 127.0.0.1.
        config: of a client that knows the server and may log in.
        stranger: of a client that knows the server, with a key it does not.
        wary: of a client that does not know the server.
    """

    folder: Path
    port: int
    process: subprocess.Popen[bytes]

    @property
    def config(self) -> str:
        return str(self.folder / "client")

    @property
    def stranger(self) -> str:
        return str(self.folder / "stranger")

    @property
    def wary(self) -> str:
        return str(self.folder / "wary")

    def hosts(self) -> str:
        """Two names of the one host, as `--host_list` has them."""
        return ",".join(NAMES)

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start(folder: Path) -> SshServer:
    """Start one; raises with its log if it does not come up."""
    for key in ("host", "client", "other"):
        command = [str(find("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", str(folder / f"{key}_key")]
        subprocess.run(command, check=True, timeout=60, stdin=subprocess.DEVNULL)
    for _ in range(5):
        server = _try(folder, free_port())  # the port may be taken in between; then another one is tried
        if server is not None:
            return server
    raise AssertionError((folder / "log").read_text())


def _try(folder: Path, port: int) -> SshServer | None:
    settings = f"""
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/client_key.pub
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups 50
"""
    (folder / "sshd_config").write_text(settings)
    key = " ".join((folder / "host_key.pub").read_text().split()[:2])
    (folder / "known").write_text("".join(f"[{name}]:{port} {key}\n" for name in NAMES))
    for name, identity, known in (
        ("client", "client", "known"),
        ("stranger", "other", "known"),
        ("wary", "client", ""),
    ):
        lines = ["IdentitiesOnly yes", f"IdentityFile {folder}/{identity}_key", "GlobalKnownHostsFile /dev/null"]
        lines.append(f"UserKnownHostsFile {folder / known if known else '/dev/null'}")
        (folder / name).write_text("\n".join(lines) + "\n")
    command = [str(find("sshd")), "-D", "-e", "-f", str(folder / "sshd_config")]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return SshServer(folder, port, process)
        time.sleep(0.02)
    process.kill()
    process.wait()
    return None

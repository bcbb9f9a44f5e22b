"""A server of the job's own is reachable for the job alone and ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bagua.data.cache import job_servers, redis_server, redis_store
from bagua.data.cache.fallback_store import FallbackStore
from bagua.data.cache.interface import choose_address
from bagua.data.cache.redis_host import RedisHost, parse_hosts
from bagua.data.cache.redis_server import RedisServer, find_program
from bagua.data.cache.redis_store import RedisStore
from bagua.data.cache.store import StoreError, StoreFullError
from tests.data.cache.test_failures import children, kill, wait_until
from tests.ports import free_port
from tests.rank_pool import RankPool

pytestmark = pytest.mark.process

redis = pytest.importorskip("redis")


@pytest.fixture
def server(servers: list[RedisServer]) -> RedisServer:
    return servers[0]


def refuses(call: Callable[[], object], message: str) -> None:
    with pytest.raises(StoreError, match=message):
        call()


def test_it_listens_on_loopback_only(server: RedisServer) -> None:
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", server.host.port), timeout=2)
    port = f":{server.host.port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    listening = [line[1] for line in lines if line[1].endswith(port) and line[3] == "0A"]
    assert listening == [f"0100007F{port}"]
    assert not any(port in line.split()[1] for line in Path("/proc/net/tcp6").read_text().splitlines()[1:])


def test_it_asks_for_the_password(server: RedisServer) -> None:
    host = server.host
    assert len(host.password or "") >= 32
    refuses(RedisStore(RedisHost(host.host, host.port)).ping, "[Aa]uthentication required")
    refuses(RedisStore(RedisHost(host.host, host.port, password="guess")).ping, "invalid username-password")
    assert (host.password or "") not in repr(host)


def test_the_password_is_on_no_command_line_and_in_no_file(server: RedisServer) -> None:
    password = (server.host.password or "").encode()
    keeper = server._process.pid
    for pid in (keeper, *children(keeper)):
        assert password not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert password not in Path(f"/proc/{pid}/environ").read_bytes()
    assert list(Path("/proc", str(children(keeper)[0]), "cwd").resolve().glob("*")) == []


def test_it_keeps_nothing_on_disk_and_honours_its_limit(server: RedisServer) -> None:
    host = server.host
    with redis.Redis(host=host.host, port=host.port, password=host.password) as client:
        assert client.config_get("save")["save"] == "" and client.config_get("appendonly")["appendonly"] == "no"
        assert int(client.config_get("maxmemory")["maxmemory"]) == 64 << 20


def test_it_ends_when_told_and_leaves_no_process(servers: list[RedisServer]) -> None:
    server = RedisServer("127.0.0.1", 8 << 20)
    pids = [server._process.pid, *children(server._process.pid)]
    directory = Path(f"/proc/{pids[1]}/cwd").resolve()
    assert directory.exists() and len(pids) >= 2
    server.stop()
    server.stop()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    assert not directory.exists()
    refuses(RedisStore(server.host).ping, "refused")


def test_it_comes_back_when_it_dies(servers: list[RedisServer]) -> None:
    server = RedisServer("127.0.0.1", 8 << 20)
    for _ in range(2):
        kill(server)
        wait_until(lambda: not server._stopping.is_set() and answers(server))
    server.stop()


def answers(server: RedisServer) -> bool:
    store = RedisStore(server.host)
    try:
        store.ping()
        return server._process.poll() is None
    except StoreError:
        return False
    finally:
        store.close()


def test_it_ends_when_its_process_is_killed(servers: list[RedisServer], pool: RankPool, tmp_path: Path) -> None:
    pool.run(1, start_and_be_killed, tmp_path / "port", init=False, fresh=True, dies=[0])
    port = int((tmp_path / "port").read_text())
    wait_until(lambda: not open_port(port))


def start_and_be_killed(said: Path) -> None:
    said.write_text(str(RedisServer("127.0.0.1", 8 << 20).host.port))
    os.kill(os.getpid(), signal.SIGKILL)


def open_port(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_an_address_that_is_not_of_this_machine_is_an_error(servers: list[RedisServer]) -> None:
    with pytest.raises(OSError, match="assign"):
        RedisServer("192.0.2.1", 8 << 20)


def test_a_server_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch, servers: list[RedisServer]) -> None:
    monkeypatch.setattr(RedisServer, "_configuration", lambda self, directory: "nonsense yes\n")
    monkeypatch.setattr(redis_server, "_START_S", 100)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="did not start: .*(Bad directive|nonsense)"):
        RedisServer("127.0.0.1", 8 << 20)
    assert time.monotonic() - start < 100, "it was waited for although it had ended"


def test_a_taken_port_is_tried_again(monkeypatch: pytest.MonkeyPatch, servers: list[RedisServer]) -> None:
    free, tried = redis_server._free_port, []

    def first_a_taken_one(address: str) -> int:
        tried.append(address)
        return servers[0].host.port if len(tried) == 1 else free(address)

    monkeypatch.setattr(redis_server, "_free_port", first_a_taken_one)
    server = RedisServer("127.0.0.1", 8 << 20)
    assert len(tried) == 2 and answers(server)
    server.stop()


def test_no_program_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(FileNotFoundError, match="apt install redis-server"):
        find_program()


def test_which_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert choose_address(None, 1) == choose_address("lo", 1) == choose_address("127.0.0.1", 3) == "127.0.0.1"
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert choose_address(None, 2) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    assert choose_address(None, 2) == "127.0.0.1"
    for wildcard in ("0.0.0.0", "::"):
        with pytest.raises(ValueError, match="every interface"):
            choose_address(wildcard, 1)
    with pytest.raises(ValueError, match="interface: 'nosuch0'"):
        choose_address("nosuch0", 1)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("MASTER_ADDR", "")
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        choose_address(None, 2)


def test_hosts_are_read() -> None:
    given = [{"host": "a", "port": "7000"}, "redis://u:p%40ss@b:1/2", "rediss://[::1]", {"host": "c", "ssl": True},
             {"host": "d", "password": "x", "ssl_ca_certs": "/ca"}]  # fmt: skip
    parsed = parse_hosts(given)
    assert [host.name for host in parsed] == ["a:7000/0", "b:1/2", "[::1]:6379/0", "c:6379/0", "d:6379/0"]
    assert parsed[1].username == "u" and parsed[1].password == "p@ss"
    assert [host.tls for host in parsed] == [None, None, (), (), (("ssl_ca_certs", "/ca"),)]


@pytest.mark.parametrize(
    "hosts",
    [[], "redis://a", {"host": "a"}, [1], ["http://a"], ["redis://"], ["redis://a:x"], [{"port": 1}],
     [{"host": "a", "port": 0}], [{"host": "a", "typo": 1}], [{"host": "a"}, {"host": "a"}],
     [{"host": "a", "ssl": False, "ssl_keyfile": "k"}]],
    ids=str,
)  # fmt: skip
def test_wrong_hosts_are_named(hosts: object) -> None:
    with pytest.raises((TypeError, ValueError), match="hosts"):
        parse_hosts(hosts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"port": 1}, 'a name or an address as "host", got None'),
        ({"host": 5}, 'as "host", got 5'),
        ({"host": "b", "db": "abc"}, "as \"db\", got 'abc'"),
        ({"host": "b", "db": None}, 'as "db", got None'),
        ({"host": "b", "db": -1}, 'as "db", got -1'),
        ({"host": "b", "db": True}, 'as "db", got True'),
        ({"host": "b", "port": 7000.7}, 'as "port", got 7000.7'),
        ({"host": "b", "port": True}, 'as "port", got True'),
        ({"host": "b", "port": "7_0"}, "as \"port\", got '7_0'"),
        ({"host": "b", "port": 65536}, "not a number from 1 to 65535, but 65536"),
        ({"host": "b", "ssl": "False"}, "expected True or False as \"ssl\", got 'False'"),
        ({"host": "b", "ssl": None}, 'as "ssl", got None'),
        ("redis://b:0", "not a number from 1 to 65535, but 0"),
        ("redis://b:70000", "the port is not a number from 1 to 65535"),
        ("redis://b/x", "as \"db\", got 'x'"),
        ("redis://b/-1", "as \"db\", got '-1'"),
        ("redis://[::1", "expected redis://"),
        ("rediss://b?ssl_ca_certs=ca.pem", 'without "?...": pass {"host": ..., "ssl": True, ...} with these options'),
    ],
    ids=str,
)
def test_a_wrong_value_of_hosts_is_refused_with_its_place(entry: object, said: str) -> None:
    with pytest.raises(ValueError, match=r"^hosts\[1\]: ") as caught:
        parse_hosts([{"host": "a"}, entry])
    assert said in str(caught.value)


def test_hosts_that_are_no_list_are_named() -> None:
    with pytest.raises(TypeError, match="hosts: expected a list of servers, got int"):
        parse_hosts(5)  # pyright: ignore[reportArgumentType]


def test_errors_do_not_quote_a_password() -> None:
    with pytest.raises(ValueError, match=r"hosts\[0\]: expected redis://") as caught:
        parse_hosts(["redis://:secret/word@a:6379"])  # '/' must be written as %2F
    assert "secret" not in str(caught.value)


def test_a_refused_write_is_logged_as_text(mortal: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    host = mortal.host
    with redis.Redis(host=host.host, port=host.port, password=host.password) as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        store = FallbackStore(RedisStore(host), host.name)
        store.mset([(bytes(range(256)), b"1"), (b"\x1b[2Jb", b"2")])
        store.close()
    (message,) = [record.getMessage() for record in caplog.records if record.name == "bagua"]
    assert "the cache accepts no more entries" in message and "used memory > 'maxmemory'" in message
    assert message.isprintable() and "Command #" not in message and "memory at 0x" not in message


@pytest.mark.parametrize("refusal", ["a replica", "no permission"])
def test_a_server_that_refuses_writes_is_still_read(mortal: RedisServer, refusal: str) -> None:
    host = mortal.host
    with redis.Redis(host=host.host, port=host.port, password=host.password) as client:
        RedisStore(host).set(b"a", b"1")
        if refusal == "a replica":
            client.execute_command("REPLICAOF", "127.0.0.1", "1")
        else:
            client.execute_command("ACL", "SETUSER", "reader", "on", ">secret", "~*", "+@read", "+ping")
            host = replace(host, username="reader", password="secret")
        store = RedisStore(host)
        with pytest.raises(StoreFullError):
            store.set(b"b", b"2")
        assert bytes(store.get(b"a") or b"") == b"1"
        store.close()


def test_tls_with_a_server_that_has_none_is_mentioned(
    servers: list[RedisServer], silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "_CONNECT_TIMEOUT_S", 0.3)
    monkeypatch.setattr(redis_store, "_TIMEOUT_S", 0.3)
    for host, hint in (
        (replace(servers[0].host, tls=()), ""),
        (RedisHost("127.0.0.1", silent_port, tls=()), "; a server without TLS does not answer, either"),
    ):
        store = RedisStore(host)
        with pytest.raises(StoreError) as caught:
            store.ping()
        store.close()
        assert str(caught.value).startswith(f"redis at {host.name} with TLS: ")
        assert str(caught.value).endswith(hint)
    plain = RedisStore(RedisHost("127.0.0.1", silent_port))
    with pytest.raises(StoreError) as caught:
        plain.ping()
    plain.close()
    assert "TLS" not in str(caught.value)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def test_tls(tmp_path: Path, servers: list[RedisServer]) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    if made.returncode:
        pytest.skip("openssl cannot make a certificate here")
    port = free_port()
    command = [find_program(), "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1", "--save", "",
               "--tls-cert-file", certificate, "--tls-key-file", key, "--tls-ca-cert-file", certificate,
               "--tls-auth-clients", "no", "--requirepass", "secret", "--dir", tmp_path]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        given = {"host": "127.0.0.1", "port": port, "password": "secret", "ssl_ca_certs": str(certificate)}
        (host,) = parse_hosts([given])
        store = RedisStore(host)
        wait_until(lambda: process.poll() is not None or reachable(store))
        if process.poll() is not None:
            pytest.skip("this redis-server is built without TLS")
        store.set(b"a", b"1" * 1_000_000)
        assert store.get(b"a") == b"1" * 1_000_000
        untrusted = RedisStore(parse_hosts([f"rediss://:secret@127.0.0.1:{port}"])[0])
        refuses(untrusted.ping, "certificate verify failed")
        store.close()
        untrusted.close()
    finally:
        process.terminate()
        process.communicate(timeout=60)


def reachable(store: RedisStore) -> bool:
    try:
        store.ping()
        return True
    except StoreError:
        return False


def test_one_server_for_equal_options(servers: list[RedisServer]) -> None:
    first = job_servers.start_servers(None, 8 << 20)
    assert job_servers.start_servers(None, 8 << 20) is first
    assert job_servers.start_servers(None, 9 << 20) != first
    job_servers.stop_servers()
    refuses(RedisStore(first[0]).ping, "refused")

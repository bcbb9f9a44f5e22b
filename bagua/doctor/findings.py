"""Rules: from what hosts report and the links between them to what a user should change, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bagua.auto.explanation import describe_rate
from bagua.auto.links import Links
from bagua.doctor.clocks import Skew

__all__ = ["Finding", "Site", "findings", "names_of"]

_LEAST_SHM = 256 * 2**20
_LEAST_FREE_SHM = 2**20
_MOST_SKEW_S = 0.5
_LEAST_FILES, _FILES_PER_RANK = 1024, 16
_JUMBO_FROM = 8e9  # bits per second, from which the CPU cost of small packets shows
_FIRST_WINDOW = 10 * 1448  # bytes that Linux sends after a pause, if it starts slowly then
_ONE_FLOW = 0.7  # of what several reach; less is a limit of the connection and not of the link
_SLOW_HOST = 0.5
_ASYMMETRIC = 2.0


@dataclass(frozen=True)
class Finding:
    """Something to change.

    Attributes:
        wrong: training would fail; otherwise it is slower than it could be, or harder to understand.
        what: is found, and why it matters.
        where: names of hosts; empty for all of them.
        do: what to change.
    """

    wrong: bool
    what: str
    where: tuple[str, ...]
    do: str

    def __str__(self) -> str:
        kind = "WRONG" if self.wrong else "CHANGE"
        return f"{kind}  {', '.join(self.where) or 'all hosts'}: {self.what}; {self.do}"


@dataclass(frozen=True)
class Site:
    """All that is known of the hosts.

    Attributes:
        nodes: ranks by host.
        hosts: the report of each host, as `examine_host` makes it.
        links: as measured; None if they could not be.
        clocks: of each host; empty if they could not be measured.
    """

    nodes: Sequence[Sequence[int]]
    hosts: Sequence[Mapping[str, Any]]
    links: Links | None = None
    clocks: Sequence[Skew] = ()

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return sum(len(node) for node in self.nodes)


def names_of(hosts: Sequence[Mapping[str, Any]]) -> list[str]:
    """Host names, each with its number where several hosts have the same one.

    Examples:
        >>> from bagua.doctor.findings import names_of
        >>> names_of([{"host": "a"}, {"host": "b"}, {"host": "a"}])
        ['a#0', 'b', 'a#2']
    """
    names = [str(each.get("host", "?")) for each in hosts]
    return [f"{name}#{place}" if names.count(name) > 1 else name for place, name in enumerate(names)]


def findings(site: Site) -> list[Finding]:
    """Apply all rules; what would make training fail comes first."""
    rules = (_versions, _devices, _loopback, _clocks, _interfaces, _tcp, _links, _shared_memory, _processors, _files)
    found = [each for rule in rules for each in rule(site)]
    return sorted(found, key=lambda each: not each.wrong)


def _where(site: Site, does: Callable[[Mapping[str, Any]], bool]) -> tuple[str, ...]:
    """Names of the hosts whose report does."""
    return tuple(name for name, host in zip(names_of(site.hosts), site.hosts, strict=True) if does(host))


def _minority(site: Site, value: Callable[[Mapping[str, Any]], Any]) -> tuple[str, tuple[str, ...]] | None:
    """Where hosts differ in `value`: the values as text, and the hosts that have not the most frequent one."""
    values = [value(host) for host in site.hosts]
    kinds = sorted(set(values), key=lambda each: (-values.count(each), str(each)))
    if len(kinds) < 2:
        return None
    text = ", ".join(f"{each if each is not None else 'none'} on {values.count(each)}" for each in kinds)
    return text, _where(site, lambda host: value(host) != kinds[0])


def _versions(site: Site) -> Iterator[Finding]:
    for name, wrong, do in (
        ("Python", False, "install the same version"),
        ("torch", False, "install the same version: another one may round or time out differently"),
        ("bagua", False, "install the same version: `bagua.distribute` compares options, not code"),
        ("NCCL", True, "install the same torch build: NCCL refuses to connect different versions"),
        ("codec kernels", False, "install the compiled library there too (`bagua doctor` on that host): others wait"),
    ):
        differs = _minority(site, lambda host, name=name: host.get("versions", {}).get(name))
        if differs is not None:
            yield Finding(wrong, f"{name} differs: {differs[0]} host(s)", differs[1], do)


def _devices(site: Site) -> Iterator[Finding]:
    some = _where(site, lambda host: bool(host.get("cuda_devices")))
    none = _where(site, lambda host: not host.get("cuda_devices"))
    if some and none:
        yield Finding(
            True, "torch finds no GPU there, but on other hosts", none, "check driver, torch build, container"
        )
    for name, host, node in zip(names_of(site.hosts), site.hosts, site.nodes, strict=True):
        devices = host.get("cuda_devices") or 0
        if 0 < devices < len(node):
            what = f"{len(node)} ranks, but {devices} GPUs"
            yield Finding(True, what, (name,), f"start it with --nproc-per-node {devices}")
    if some:
        differs = _minority(site, lambda host: bool(host.get("bagua_net", {}).get("would_load")))
        if differs is not None:
            what = "NCCL would load Bagua-Net on some hosts only, and its connections need it on both ends"
            less = _where(site, lambda host: not host.get("bagua_net", {}).get("would_load"))
            yield Finding(True, what, less, "use --enable-bagua-net on all hosts or on none")


def _loopback(site: Site) -> Iterator[Finding]:
    if site.links is None and len(site.nodes) > 1:
        local = _where(site, lambda host: bool(host.get("name_is_loopback")) and not host.get("interface_chosen"))
        if local:
            what = "its host name stands for a loopback address, which gloo gives to other hosts"
            yield Finding(True, what, local, "set GLOO_SOCKET_IFNAME to the interface between the hosts")


def _clocks(site: Site) -> Iterator[Finding]:
    for name, skew in zip(names_of(site.hosts), site.clocks, strict=False):
        if skew.least_s > _MOST_SKEW_S:
            way = "ahead of" if skew.seconds > 0 else "behind"
            what = f"the clock is {abs(skew.seconds):.1f} s {way} rank 0's, so logs and traces do not line up"
            yield Finding(False, what, (name,), "synchronise it (chrony or ntpd)")


def _mtu(host: Mapping[str, Any]) -> int | None:
    return host.get("mtu", {}).get(host.get("interface"))


def _interfaces(site: Site) -> Iterator[Finding]:
    if len(site.nodes) < 2:
        return
    differs = _minority(site, _mtu)
    known = [_mtu(host) for host in site.hosts]
    if differs is not None and None not in known:
        what = f"the MTU differs: {differs[0]} host(s), and large packets may be lost or split"
        yield Finding(False, what, differs[1], "set the same one: ip link set dev INTERFACE mtu N")
    elif site.links is not None and site.links.bandwidth >= _JUMBO_FROM and known[0] is not None and known[0] <= 1500:
        what = f"MTU {known[0]} at {describe_rate(site.links.bandwidth)} costs much CPU"
        yield Finding(False, what, (), "set 9000 if all switches between the hosts carry it")


def _tcp(site: Site) -> Iterator[Finding]:
    if len(site.nodes) < 2:
        return
    for key, name in (
        ("congestion_control", "net.ipv4.tcp_congestion_control"),
        ("rmem_max", "net.core.rmem_max"),
        ("wmem_max", "net.core.wmem_max"),
    ):
        differs = _minority(site, lambda host, key=key: host.get("tcp", {}).get(key))
        if differs is not None:
            yield Finding(False, f"{name} differs: {differs[0]} host(s)", differs[1], f"sysctl -w {name}=VALUE")
    if site.links is None or not site.links.between:
        return
    rate = max(each.bits_per_s for each in site.links.between)
    in_flight = rate / 8 * 2 * max(each.latency_s for each in site.links.between)
    need = int(2 * in_flight)  # half of a buffer is overhead
    for key, name in (("tcp_rmem_max", "net.ipv4.tcp_rmem"), ("tcp_wmem_max", "net.ipv4.tcp_wmem")):
        small = _where(site, lambda host, key=key: 0 < (host.get("tcp", {}).get(key) or 0) < need)
        if small:
            what = f"the largest {name} is less than the {need} bytes that keep one connection busy on these links"
            yield Finding(False, what, small, f'sysctl -w {name}="4096 131072 {2 * need}"')
    idle = _where(site, lambda host: host.get("tcp", {}).get("slow_start_after_idle") == 1)
    if idle and in_flight > 2 * _FIRST_WINDOW:
        what = f"connections start slowly after each pause, with {in_flight / 2**10:.0f} KiB in flight at full rate"
        yield Finding(False, what, idle, "sysctl -w net.ipv4.tcp_slow_start_after_idle=0")


def _links(site: Site) -> Iterator[Finding]:
    if site.links is None or not site.links.between:
        return
    names = {rank: name for node, name in zip(site.nodes, names_of(site.hosts), strict=True) for rank in node}
    between = site.links.between
    capped = sorted({names[each.source] for each in between if each.one_flow < _ONE_FLOW * each.several_flows})
    if capped:
        what = "one connection reaches less than 70 % of what four reach"
        yield Finding(False, what, tuple(capped), "raise TCP buffers, or keep `autotune`, which uses several lanes")
    best_of = {
        name: max(each.bits_per_s for each in between if name in (names[each.source], names[each.target]))
        for name in sorted({names[each.source] for each in between})
    }
    fastest = max(best_of.values())
    for name, rate in best_of.items():
        if rate < _SLOW_HOST * fastest:
            what = f"{describe_rate(rate)} at most, others reach {describe_rate(fastest)}, and all wait for the slowest"
            yield Finding(False, what, (name,), "check its cable, port, or virtual machine type")
    rates = {(each.source, each.target): each.bits_per_s for each in between}
    for (a, b), rate in rates.items():
        back = rates.get((b, a))
        if back is not None and rate < back / _ASYMMETRIC:
            what = f"{describe_rate(rate)} from {names[a]} to {names[b]}, {describe_rate(back)} back"
            yield Finding(False, what, (names[a], names[b]), "check duplex, traffic limits and other jobs on the link")


def _shared_memory(site: Site) -> Iterator[Finding]:
    for name, host in zip(names_of(site.hosts), site.hosts, strict=True):
        shm = host.get("shm")
        do = "start the container with --shm-size 8g, or: mount -o remount,size=8G /dev/shm"
        if not shm:
            yield Finding(False, "there is no /dev/shm; workers of data loaders and NCCL need it", (name,), do)
        elif shm["free"] < _LEAST_FREE_SHM:
            yield Finding(True, "/dev/shm is full; workers of data loaders and NCCL end with an error", (name,), do)
        elif shm["size"] < _LEAST_SHM:
            what = f"/dev/shm has {shm['size'] / 2**20:.0f} MiB, which workers of data loaders soon fill"
            yield Finding(False, what, (name,), do)


def _processors(site: Site) -> Iterator[Finding]:
    differs = _minority(site, lambda host: host.get("cores"))
    if differs is not None:
        what = f"usable CPU cores differ: {differs[0]} host(s), and all wait for the slowest"
        yield Finding(False, what, differs[1], "give all processes the same share (cpuset, SLURM --cpus-per-task)")
    for name, host, node in zip(names_of(site.hosts), site.hosts, site.nodes, strict=True):
        cores, threads = host.get("cores") or 0, host.get("threads") or 1
        if 0 < cores < len(node):
            what = f"{len(node)} ranks share {cores} CPU core(s)"
            yield Finding(False, what, (name,), "start fewer ranks, or allow more cores")
        elif 0 < cores < threads * len(node) and len(node) > 1:
            what = f"{len(node)} ranks of {threads} CPU threads each on {cores} core(s)"
            yield Finding(False, what, (name,), f"set OMP_NUM_THREADS={max(1, cores // len(node))}")


def _files(site: Site) -> Iterator[Finding]:
    need = max(_LEAST_FILES, _FILES_PER_RANK * site.ranks)
    few = _where(site, lambda host: 0 < (host.get("max_open_files") or 0) < need)
    if few:
        wrong = bool(_where(site, lambda host: 0 < (host.get("max_open_files") or 0) < 2 * site.ranks))
        what = f"fewer than {need} files may be open, and each connection is one"
        yield Finding(wrong, what, few, f"ulimit -n {max(need, 65536)}")

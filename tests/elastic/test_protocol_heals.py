"""A host that was cut off trains with the others again, also on machines so busy that live hosts are taken for lost."""

from __future__ import annotations

import random

import pytest

from bagua.membership import Options
from tests.elastic.protocol_simulation import Cluster
from tests.elastic.protocol_simulation.host import Host

HOSTS, CUT_S, BACK_WITHIN_S = 5, 10.0, 60.0


def stall(cluster: Cluster, host: Host, draws: random.Random, longest_s: float) -> None:
    """From now on all of its processes stop now and then."""

    def stop() -> None:
        now = cluster.network.now
        host.stopped_until = max(host.stopped_until, now + draws.uniform(0.0, longest_s))
        cluster.network.after(draws.expovariate(0.2), stop)

    cluster.network.after(draws.expovariate(0.2), stop)


@pytest.mark.parametrize("longest_s", [0.0, 0.8, 1.5])  # silence of 1 s counts as a loss
@pytest.mark.parametrize("seed", [0, 1])
def test_a_host_that_was_cut_off_is_back(seed: int, longest_s: float) -> None:
    """All train in one epoch at some time within a minute of simulated time. No wait may grow with each failure."""
    options = Options(detect_s=1.0)
    cluster = Cluster(seed, faults=False, compute_s=[0.1] * HOSTS, ranks=1, options=options)
    network, hosts = cluster.network, cluster.hosts[:HOSTS]
    draws = random.Random(seed)
    for host in hosts if longest_s else []:
        stall(cluster, host, draws, longest_s)
    network.run(3.0)
    cut, others = hosts[-1].address, [host.address for host in hosts[:-1]]
    network.sever({(cut, other) for other in others} | {(other, cut) for other in others}, CUT_S)
    network.run(3.0 + CUT_S)
    agent = hosts[-1].agent
    assert agent is not None and agent.name not in {m.name for m in cluster.decided[max(cluster.decided)].trainers}
    until = network.now + BACK_WITHIN_S
    while agent.member is None or not agent.member.trains or agent.behind or len(_trainers(hosts[-1])) < HOSTS:
        assert network.now < until, "kept out"
        network.run(network.now + 0.25)


def _trainers(host: Host) -> set[str]:
    assert host.agent is not None and host.agent.epoch is not None
    return {member.name for member in host.agent.epoch.trainers}

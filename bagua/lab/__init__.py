"""An emulated cluster on one Linux machine: hosts are network namespaces, links have a bandwidth and a latency.

Imports nothing of torch, so that the cluster's own processes start fast.
"""

from bagua.lab.cluster import Cluster
from bagua.lab.errors import LabError
from bagua.lab.host import Host
from bagua.lab.link import Link
from bagua.lab.report import HostReport, PairReport, Report

__all__ = ["Cluster", "Host", "HostReport", "LabError", "Link", "PairReport", "Report"]

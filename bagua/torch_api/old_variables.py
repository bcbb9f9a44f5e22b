"""Environment variables of the original that have no effect here: each that is set is named once, in the log."""

from __future__ import annotations

import os

from bagua.torch_api.report import report_once

__all__ = ["OLD_VARIABLES", "report_old_variables"]

_NO_SERVER = "Bagua has no server"
# name -> what to know instead
OLD_VARIABLES = {
    "AUTO_TUNE_SERVER_ADDR": f"{_NO_SERVER}; rank 0 tunes through the process group's store",
    "BAGUA_AUTOTUNE_SERVER_WAIT_TIME": f"{_NO_SERVER}; ranks wait for each other for the process group's timeout",
    "BAGUA_NET_IMPLEMENT": "Bagua-Net has one implementation; BAGUA_NET_SCHEDULE chooses how it divides messages",
    "BAGUA_NET_JAEGER_ADDRESS": "nothing is exported; BAGUA_NET_STATS=1 prints a line for each connection",
    "BAGUA_NET_MIN_CHUNKSIZE": "use BAGUA_NET_SLICE_BYTES",
    "BAGUA_NET_NSTREAMS": "use BAGUA_NET_FLOWS",
    "BAGUA_NET_PROMETHEUS_ADDRESS": "nothing is exported; BAGUA_NET_STATS=1 prints a line for each connection",
    "BAGUA_NET_TOKIO_WORKER_THREADS": "there is no pool of threads to size",
    "BAGUA_REPORT_METRICS": f"{_NO_SERVER}; bagua.stats(module) has the figures",
    "BAGUA_SERVICE_PORT": f"{_NO_SERVER}, so no port is needed",
}
_UNSET = {"BAGUA_REPORT_METRICS": ("", "0"), "BAGUA_SERVICE_PORT": ("", "-1")}  # values that ask for nothing


def report_old_variables() -> None:
    """Log a warning for each variable that is set, the first time in this process."""
    for name, instead in OLD_VARIABLES.items():
        if os.environ.get(name, "") not in _UNSET.get(name, ("",)):
            report_once(f"{name}: has no effect: {instead}")

"""A host that joins the rendezvous and is killed before its ranks are counted.

python tests/elastic/ghost.py ENDPOINTS CONFIG
"""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from bagua.distributed.failover import BACKEND, FailoverRendezvous


def die(*_: object, **__: object) -> None:
    os._exit(9)


RendezvousStoreInfo.build = die
os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
config = dict(pair.split("=") for pair in sys.argv[2].split(","))
params = RendezvousParameters(BACKEND, sys.argv[1], "job", 2, 3, local_addr="127.0.0.1", **config)
FailoverRendezvous(params).next_rendezvous()

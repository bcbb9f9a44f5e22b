"""The table of distributed modules, which several threads use at the same time."""

from __future__ import annotations

import sys
import threading
from typing import Any

from torch import nn

from bagua.engine.hooks import _Attachments


def test_it_can_be_read_while_other_threads_change_it() -> None:
    table: Any = _Attachments()
    kept = [nn.Identity() for _ in range(50)]
    for module in kept:
        table[module] = "kept"
    done = threading.Event()

    def change() -> None:
        while not done.is_set():
            module = nn.Identity()
            table[module] = "dropped"
            del table[module]

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        for _ in range(2000):
            assert [module for module, value in table.pairs() if value == "kept"] == kept
            assert table.all().count("kept") == len(kept)
    finally:
        done.set()
        thread.join(10)
        sys.setswitchinterval(interval)

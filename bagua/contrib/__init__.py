"""Methods that are not part of the library proper: `import bagua.contrib` registers them.

Each is one file, keeps to the contract of its kind (`bagua.testing`) and names its source. What it lacks is a
comparison with the methods of the library; names and options may change between two minor versions. Import it on all
ranks.

    import bagua.contrib
    model = bagua.distribute(model, optimizer, "signsgd")
"""

from __future__ import annotations

from bagua.contrib.decoupled_diloco import DecoupledDiLoCo, count_tokens
from bagua.contrib.demo import DeMo
from bagua.contrib.dion import Dion
from bagua.contrib.signsgd import SignSGD

__all__ = ["DeMo", "DecoupledDiLoCo", "Dion", "SignSGD", "count_tokens"]

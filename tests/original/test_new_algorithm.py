"""The methods and arguments that the tutorial "How to create a new algorithm" uses are there.

`tests/facade/test_adapter.py` trains the tutorial's algorithm against its formulas.
"""

from __future__ import annotations

import inspect

from bagua.torch_api.algorithms import Algorithm, AlgorithmImpl
from bagua.torch_api.bucket import BaguaBucket
from tests.facade import old_style

HOOKS = {
    "need_reset",
    "init_tensors",
    "tensors_to_buckets",
    "init_forward_pre_hook",
    "init_backward_hook",
    "init_post_backward_hook",
    "init_post_optimizer_step_hook",
    "init_operations",
}


def test_the_surface_of_the_tutorial() -> None:
    assert {name for name, _ in inspect.getmembers(AlgorithmImpl, inspect.isfunction) if name[0] != "_"} == HOOKS
    tutorial = old_style.MomentaInEightBitsImpl
    assert {name for name in vars(tutorial) if name in HOOKS} == {
        "need_reset",
        "init_tensors",
        "init_operations",
        "init_backward_hook",
    }
    assert issubclass(old_style.MomentaInEightBits, Algorithm)
    arguments = inspect.signature(BaguaBucket.append_centralized_synchronous_op).parameters
    assert list(arguments)[1:] == ["hierarchical", "average", "scattergather", "compression", "group"]

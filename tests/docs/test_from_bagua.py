"""The page about Bagua 0.9 and the code agree: every difference has a test, every error is raised."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

from bagua.gone import Gone
from tests.docs.markdown import ROOT

PAGE = (ROOT / "docs" / "from-bagua.md").read_text()

# Bold beginning of each bullet of "What is computed differently" -> tests of it.
DIFFERENCES = {
    "MoE.": [
        "moe/test_layer.py::test_gradient_sum_is_the_originals",
        "moe/test_routing.py::test_dropped_tokens_are_drawn_in_training_only",
    ],
    "ByteGrad": [
        "codecs/test_minmax_uint8.py::test_all_backends_agree_with_the_oracle",
        "codecs/test_minmax_uint8.py::test_ranges",
    ],
    "QAdam": ["algorithms/test_qadam.py::test_alone_after_the_warm_up_the_second_moment_is_fixed"],
    "Decentralized, shift_one": ["test_topologies.py::test_shift_one_pairs"],
    "Async": ["algorithms/test_async_rounds.py::test_nobody_waits_for_a_straggler"],
    "Hierarchical": ["exchanges/test_exchanges.py::test_hierarchical_weighs_ranks_not_nodes"],
    "Parameters without a gradient": ["engine/test_unused.py::test_gradients_are_means_over_all_ranks"],
    "Buffers and frozen parameters": ["engine/test_lifecycle.py::test_everyone_equals_rank_0"],
    "Gradient accumulation": ["engine/test_gradients.py::test_equal_to_ddp_to_the_last_bit"],
    "Algorithms of your own": [
        "facade/test_adapter.py::test_parameters_without_a_gradient_hold_nothing_up",
        "facade/test_adapter.py::test_a_reset_gives_everyone_the_weights_of_rank_0",
        "facade/test_adapter.py::test_wrong_uses_say_what_to_do",
    ],
    "`from_torch_group`": ["original/test_process_group.py::test_groups_of_some_ranks"],
    "`broadcast_object`": ["comm/test_objects.py::test_a_peer_cannot_name_what_is_run"],
    "After `communicator.abort()`": ["original/test_communicator.py::test_after_an_abort_operations_return"],
    "The registry": ["facade/test_with_bagua.py::test_registry"],
    "`StatisticalAverage`": ["original/test_service.py::test_statistical_average"],
    "`ClusterStore`": ["facade/test_old_contrib.py::test_stores"],
    "`shuffle_chunks()`": ["facade/test_old_contrib.py::test_samplers_show_their_chunks"],
    "`BAGUA_IS_OUTPUT_AUTOTUNE_LOG=0`": ["facade/test_old_helpers.py::test_environment"],
}
# First name of each row that is marked "error" -> where it is.
ERRORS = {
    "get_backend(model_name)": "bagua.torch_api.communication:get_backend",
    "get_communicator(group, name)": "bagua.torch_api.communication:get_communicator",
    "DecentralizedAlgorithmImpl": "bagua.torch_api.algorithms.decentralized:DecentralizedAlgorithmImpl",
    "bagua.service": "bagua.service:AutotuneService",
    "BaguaDistributedDataParallel(...)": "bagua.torch_api.data_parallel.bagua_distributed:BaguaDistributedDataParallel",
    "start_redis_server_cli": "bagua.torch_api.contrib.utils.redis_store:start_redis_server_cli",
    "LightningBaguaModule": "lightning_bagua.strategy:LightningBaguaModule",
}


def _section(title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    assert found, f"the page has no section {title!r}"
    return found[1]


def _functions(name: str) -> Iterator[str]:
    for node in ast.parse((ROOT / "tests" / name).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name


def test_every_difference_has_a_test() -> None:
    bullets = re.findall(r"^- \*\*(.+?)\*\*", _section("What is computed differently"), re.MULTILINE)
    assert sorted(bullets) == sorted(DIFFERENCES)
    for tests in DIFFERENCES.values():
        for test in tests:
            path, function = test.split("::")
            assert function in set(_functions(path)), test


def _marked() -> list[str]:
    rows = re.findall(r"^\| (.+?) \| .+? \| yes \|$", _section("What is not there"), re.MULTILINE)
    return [re.findall(r"`(.+?)`", row)[0] for row in rows]


def test_every_row_marked_as_an_error_is_known() -> None:
    assert sorted(_marked()) == sorted(ERRORS)


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_marked_as_an_error_raises_one(name: str) -> None:
    module, attribute = ERRORS[name].split(":")
    if module.startswith("lightning_bagua"):
        pytest.importorskip("lightning")
    stand_in: Any = getattr(import_module(module), attribute)
    with pytest.raises(NotImplementedError, match=attribute):
        stand_in("argument")


def test_nothing_else_is_gone() -> None:
    """Stand-ins of the facade are named on the page."""
    modules = ("communication", "tensor", "bucket", "data_parallel.bagua_distributed", "contrib.utils.redis_store")
    for module in modules:
        for name, value in vars(import_module(f"bagua.torch_api.{module}")).items():
            tuning = ("get_hyperparameters_service_client", "start_autotune_server")  # of the server
            assert not isinstance(value, Gone) or name in PAGE or name in tuning, f"{module}.{name}"

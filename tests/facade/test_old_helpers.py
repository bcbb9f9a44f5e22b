"""Helpers of the original's `utils`, `env` and `bagua_define`: flat tensors, scores, environment variables."""

from __future__ import annotations

import pytest
import torch

from tests.docs.markdown import ROOT


def test_descriptions_of_tensors() -> None:
    from bagua.bagua_define import BaguaHyperparameter, TensorDtype, get_tensor_declaration_bytes

    sizes = [get_tensor_declaration_bytes({"name": "w", "num_elements": 10, "dtype": dtype}) for dtype in TensorDtype]
    assert sizes == [40, 20, 10] and TensorDtype.F16 == "f16"
    chosen = BaguaHyperparameter().update({"bucket_size": 5, "no field": 1})
    assert chosen.dict() == {"buckets": [], "bucket_size": 5, "is_hierarchical_reduce": False}
    assert BaguaHyperparameter().buckets is not chosen.buckets


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.torch_api import env

    names = "MASTER_ADDR BAGUA_SERVICE_PORT BAGUA_REPORT_METRICS BAGUA_AUTOTUNE BAGUA_AUTOTUNE_MAX_SAMPLES "
    names += "BAGUA_AUTOTUNE_SAMPLING_CONFIDENCE_TIME_S BAGUA_AUTOTUNE_WARMUP_TIME_S BAGUA_IS_OUTPUT_AUTOTUNE_LOG "
    names += "BAGUA_AUTOTUNE_SERVER_WAIT_TIME RANK GROUP_RANK LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK"
    for name in names.split():
        monkeypatch.delenv(name, raising=False)
    assert (env.get_master_addr(), env.get_bagua_service_port(), env.is_report_metrics_switch_on()) == (
        "127.0.0.1",
        -1,
        False,
    )
    assert (env.get_autotune_level(), env.get_autotune_max_samples()) == (0, 60)
    assert (env.get_autotune_sampling_confidence_time_s(), env.get_autotune_warmup_time_s()) == (5.0, 30.0)
    assert (env.get_is_output_autotune_log(), env.get_autotune_server_wait_time()) == (False, 300)
    assert (env._is_elastic_launched(), env.get_node_rank()) == (False, 0)
    monkeypatch.setenv("BAGUA_IS_OUTPUT_AUTOTUNE_LOG", "0")
    assert not env.get_is_output_autotune_log(), "the original took the text 0 for true"
    monkeypatch.setenv("BAGUA_AUTOTUNE_WARMUP_TIME_S", "soon")
    with pytest.raises(ValueError, match="BAGUA_AUTOTUNE_WARMUP_TIME_S.*soon"):
        env.get_autotune_warmup_time_s()
    monkeypatch.setenv("NODE_RANK", "3")
    assert env.get_node_rank() == 3
    for name in ("RANK", "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "1")
    assert env._is_elastic_launched() and env.get_node_rank() == 1
    assert 0 < env.find_free_network_port() < 65536


def test_flat_tensors() -> None:
    from bagua.torch_api import utils

    whole = torch.arange(10.0)
    parts = [whole[:4], whole[4:6].view(2, 1), whole[6:]]
    assert utils.check_contiguous(parts) and not utils.check_contiguous(parts[::-1])
    assert torch.equal(utils.flatten(parts), whole)
    copied = utils.get_flattened_tensor(parts)
    assert copied is not None and torch.equal(copied, whole) and copied.data_ptr() != whole.data_ptr()
    assert utils.get_flattened_tensor([]) is None
    apart = [torch.ones(3), torch.ones(2, dtype=torch.int64), torch.ones(2)]
    utils.apply_flattened_call_all(apart, lambda flat: flat.mul_(len(flat)))
    assert [each.tolist() for each in apart] == [[5.0] * 3, [2] * 2, [5.0] * 2]
    assert [utils.to_bagua_datatype(d) for d in (torch.float32, torch.float16, torch.uint8, torch.long)] == [
        "f32",
        "f16",
        "u8",
        "i64",
    ]
    with pytest.raises(ValueError, match="bfloat16"):
        utils.to_bagua_datatype(torch.bfloat16)


def test_scores_without_what_is_far_off() -> None:
    from bagua.torch_api.utils import average_by_removing_extreme_values

    mean, deviation, kept = average_by_removing_extreme_values([900.0, 900.0, 900.0, 1.0, 2.0, 3.0, 2.0, 2.0, 50.0])
    assert kept == [1.0, 2.0, 3.0, 2.0, 2.0] and mean == 2.0 and 0.6 < deviation < 0.7
    assert average_by_removing_extreme_values([4.0]) == (4.0, 0.0, [4.0])


def test_a_mean_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from bagua.torch_api import statistical_average, utils

    now = [1000.0]
    monkeypatch.setattr(statistical_average.time, "time", lambda: now[0])
    # 5 for a second, then back in time: 4 for one, 2.5 for two, and 0.5 for two more.
    means = utils.StatisticalAverage(1000.0, [5.0, 4.5, 3.5], (2.0, 2.5))
    now[0] += 1
    means.record(6.0)
    assert [means.get_records_mean(n) for n in (1.0, 2.0, 3.0, 5.0, 7.0)] == pytest.approx(
        [6.0, 11 / 2, (6 + 4.5 * 2) / 3, (6 + 3.5 * 4) / 5, (6 + 2.5 * 6) / 7]
    )
    assert means.total_recording_time() == pytest.approx(7.0)
    now[0] += 2
    assert means.get(1.0) == 6.0 and means.get(4.0) == pytest.approx(11 / 2)
    assert utils.StatisticalAverage().get(5.0) == 0.0


def test_variables_without_effect_are_named_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from bagua.torch_api import report
    from bagua.torch_api.old_variables import OLD_VARIABLES, report_old_variables

    monkeypatch.setattr(report, "_said", set())
    for name in OLD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in {"BAGUA_SERVICE_PORT": "-1", "BAGUA_REPORT_METRICS": "0"}.items():
        monkeypatch.setenv(name, value)
    report_old_variables()
    assert not caplog.messages
    for name in OLD_VARIABLES:
        monkeypatch.setenv(name, "8")
    report_old_variables()
    report_old_variables()
    assert sorted(message.split(":")[0] for message in caplog.messages) == sorted(OLD_VARIABLES)
    assert any("BAGUA_NET_FLOWS" in message for message in caplog.messages)
    page = (ROOT / "docs" / "from-bagua.md").read_text()
    assert all(f"`{name}`" in page for name in OLD_VARIABLES), "the page names them"

"""The monitors on two real gloo ranks: one launch of two_ranks.py, and what it found."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torchrun import found_by

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each check found, on rank 0 and on rank 1."""
    output = tmp_path_factory.mktemp("monitor") / "found.json"
    return dict(found_by("tests.monitor.two_ranks", output))


def test_the_curve_of_every_micro_batch_is_that_of_one_process(found: dict[str, Any], record_property: Any) -> None:
    """The sparse curve oscillates, ours is as smooth as one process's: the figures of the README."""
    its = found["loss_curves"][0]
    variance = its["variance"]
    record_property("variance", variance)
    ours = variance["two ranks, every micro-batch"]
    assert its["apart"] < 1e-5
    assert ours == pytest.approx(variance["one process, every micro-batch"], rel=1e-3)
    # One batch in ten: ten times the variance, give or take what 40 logs tell; one rank's half batch: twice that.
    assert 4 < variance["two ranks, last batch"] / ours < 25
    assert 6 < variance["two ranks, one rank's last batch"] / ours < 50
    assert 0.25 < its["standard_error"] ** 2 / ours < 4


def test_readings_are_the_same_on_every_rank_and_weigh_items(found: dict[str, Any]) -> None:
    for its in found["uneven_readings"]:
        assert its["mean"] == pytest.approx((2 * 3 + 4 * 1 + 1 * 6) / 10)
        assert its["rank_means"] == pytest.approx([2.5, 1.0]) and its["spread"] == pytest.approx(1.5)
        assert its["micro_batches"] == 3 and its["empty"] == 0


def test_a_rank_without_a_loss_takes_part_in_no_mean(found: dict[str, Any]) -> None:
    for its in found["uneven_readings"]:
        assert its["last_stage"] == 5.0 and its["with_a_loss"] == [False, True] and its["seen_by"] == [5.0, 5.0]


def test_the_hook_sees_the_accumulated_gradient_before_its_reduction(found: dict[str, Any]) -> None:
    for its in found["gradients_before_reduction"]:
        assert its["steps"] == [2, 2] and its["apart"] < 1e-5 and its["ranks_differ"]
        assert its["same_bits"], "the hook changed the averaged gradient"
        assert "has a communication hook already" in its["refused"]


def test_the_noise_scale_over_two_ranks_is_the_closed_form(found: dict[str, Any]) -> None:
    for its in found["noise_scale"]:
        assert its["scale"] == pytest.approx(its["closed_form"], rel=0.05)
        assert its["items"] == 121 and 0.001 < its["error"] < 0.02
    assert found["noise_scale"][0] == found["noise_scale"][1]


def test_a_rank_that_scales_its_loss_is_named(found: dict[str, Any]) -> None:
    its = found["planted_gradient"][0]
    assert its["times 1"] == []
    assert its["times 8"][0].startswith("rank 1: its gradient before the reduction is ")
    assert found["planted_gradient"][1] == its


def test_replicas_in_step_are_left_alone(found: dict[str, Any]) -> None:
    for its in found["replicas_in_step"]:
        assert its["generators_differ"], "the control needs dropout that differs"
        assert its["healthy"] == []
        assert its["sums_in_20_steps"] == 4


@pytest.mark.parametrize(
    ("fault", "name", "largest", "elements"),
    [
        ("one element", "parameter module.4.weight", 0.25, 1),
        ("one parameter", "parameter module.0.bias", 0.5, 32),
        ("optimizer", "exp_avg of module.0.weight", 1e-3, 1),
        ("one bit", "parameter module.0.weight", 0.0, 1),
    ],
)
def test_a_replica_out_of_step_is_told_by_its_first_tensor(
    fault: str, name: str, largest: float, elements: int, found: dict[str, Any]
) -> None:
    for rank in found["replicas_in_step"]:
        its = rank[fault]
        assert its["name"] == name and its["ranks"] == [1] and its["elements"] == [elements] and its["tensors"] == 1
        assert its["largest"][0] == pytest.approx(largest, rel=1e-3, abs=1e-6)
        assert f"{name} differs: rank 1 by up to" in its["told"]
        assert rank[f"{fault}, fixed"]


def test_a_rank_that_has_not_stepped_is_told(found: dict[str, Any]) -> None:
    assert "the ranks hold [24, 21] tensors" in found["replicas_in_step"][0]["state missing on one rank"]


def test_ranks_that_hold_other_shapes_train_on(found: dict[str, Any]) -> None:
    for its in found["other_shapes"]:
        assert its["replicas"] == "replicas-not-alike" and its["buffers"] is None


def test_a_model_converted_after_wrapping_leaves_stale_parameters(found: dict[str, Any]) -> None:
    for its in found["batch_norm"]:
        after, before = its["after"], its["before"]
        assert not after["trained"] and not after["gradients_averaged"]
        assert before["trained"] and before["gradients_averaged"]
        assert "batch-norm-stale-parameters" in after["kinds"]
        assert "batch-norm-stale-parameters" not in before["kinds"]


def test_statistics_of_a_cut_batch_and_of_single_ranks_are_told(found: dict[str, Any]) -> None:
    its = found["batch_norm"][0]["before"]
    # Running statistics differ between two forwards by design: DDP copies rank 0's.
    assert its["kinds"] == ["batch-norm-accumulation"]
    assert "16 samples, while an optimizer step has 128" in its["told"][0]
    assert found["batch_norm"][1]["before"]["kinds"] == its["kinds"]


def test_the_last_pipeline_stage_tells_every_rank_its_loss(found: dict[str, Any]) -> None:
    for its in found["pipeline"]:
        assert its["mean"] == pytest.approx([its["expected"]] * 2, rel=1e-6)
        assert its["with_a_loss"] == [False, True] and its["micro_batches"] == 12
        # What averages over a sentinel shows something else altogether.
        assert abs(its["average_over_sentinels"] - its["expected"]) > 1


def test_the_trainer_logs_every_monitor_beside_its_loss(found: dict[str, Any]) -> None:
    rows = found["trainer"][0]["rows"]
    assert [row["step"] for row in rows] == [4, 8, 12]
    names = {
        "loss", "loss_standard_error", "rank_loss_spread", "rank_loss_worst_rank", "rank_loss_alarms",
        "rank_loss_worst_in_standard_errors", "gradient_norm_median", "gradient_norm_mad", "gradient_norm_spikes",
        "clipped_steps_share", "gradient_norm_alarms", "rank_gradient_norm_jitter", "rank_gradient_worst_rank",
        "rank_gradient_worst_in_standard_errors", "rank_gradient_alarms", "replicas_alarms", "batch_norm_alarms",
        "memory_mib", "memory_reserved_mib", "memory_peak_mib", "memory_alarms", "slowest_rank", "slowest_rank_lag_s",
        "pace_alarms", "shared_samples_alarms", "items_per_step", "ranks",
    }  # fmt: skip
    for row in rows[1:]:
        assert {f"hf_accum_fix/{name}" for name in names} <= row.keys()
        assert all(value == 0 for key, value in row.items() if key.endswith("_alarms"))


def test_the_logged_mean_weighs_tokens_where_the_trainer_averages_steps(found: dict[str, Any]) -> None:
    for its in found["trainer"]:
        first = its["rows"][0]
        assert first["hf_accum_fix/loss"] == pytest.approx(its["by_hand"], rel=1e-6)
        assert first["hf_accum_fix/loss"] != pytest.approx(first["loss"], rel=1e-6)


def test_nothing_is_summed_but_at_a_log_or_a_check(found: dict[str, Any]) -> None:
    # One sum a log, at 4, 8 and 12, and in the first what all ranks can watch; replicas every 6 steps, and at the
    # beginning whether all ranks have them; whether any rank has BatchNorm after the first step and at the end.
    assert found["trainer"][0]["sums_at_steps"] == {"0": 1, "1": 1, "4": 2, "6": 1, "8": 1, "12": 3}


def test_the_trainer_is_left_as_it_was(found: dict[str, Any]) -> None:
    for its in found["trainer"]:
        assert its["as_it_was"] and its["left_behind"] == [] and its["accelerator"] == []

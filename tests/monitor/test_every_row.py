"""Each thing that the documents behind the monitors ask for has a test: the row, and the test that serves it."""

from __future__ import annotations

from importlib import import_module

import pytest

ROWS = {
    "two GPUs: a mean of every micro-batch": "two_ranks.the_curve_of_every_micro_batch_is_that_of_one_process",
    "an exponential moving average": "loss.the_moving_average_weighs_logs_by_their_items_and_their_age",
    "timm's and others' own logs": "watch_findings.what_people_have",
    "loss per rank": "monitor.ranks_alike_log_alike_and_a_rank_that_is_off_is_named",
    "oscillation": "loss_over_time.a_swing_is_told_once_as_long_as_it_lasts",
    "slow convergence": "loss_over_time.a_run_that_learns_nothing_is_told_once",
    "divergence": "trends.a_loss_that_rises_for_good_is_told_once",
    "a first loss far above a guess": "loss_over_time.a_first_loss_far_above_a_guess",
    "gradient explosion": "trends.a_norm_that_grows_steadily_is_told",
    "gradients that vanish": "trends.a_norm_that_vanishes_is_told",
    "always clipped": "trends.steps_that_are_all_clipped_far_down_are_told",
    "rank alignment, jitter": "rank_loss.a_planted_rank_is_named",
    "a zero gradient on a rank": "never_ends_a_run.a_gradient_of_zero_on_one_rank_is_told_by_the_first_judgement",
    "a rank that lags": "pace.a_rank_that_lags_is_named_and_a_healthy_run_is_not",
    "accuracy against loss": "loss_over_time.an_accuracy_that_stands_while_the_loss_falls",
    "Horovod": "one_collective.horovods_local_gradients_are_seen_by_its_compression",
    "shifted duplicates": "shared_samples.a_share_of_one_half_and_more_is_told",
    "augmented duplicates": "shared_samples.augmented_samples_are_found_by_what_stays_the_same",
    "one collective a log": "callbacks.a_log_of_all_callbacks_is_one_sum",
    "SyncBatchNorm in the wrong order": "two_ranks.a_model_converted_after_wrapping_leaves_stale_parameters",
    "SyncBatchNorm over a subgroup": "never_ends_a_run.synchronised_statistics_count_the_ranks_of_their_group",
    "-1.0, a mean over stages": "watch_findings.what_is_wrong_with_a_run_is_a_finding",
    "which rank to look at": "two_ranks.the_last_pipeline_stage_tells_every_rank_its_loss",
    "memory: warm-up": "memory.the_warm_up_is_set_aside_and_the_plateau_said",
    "memory: late leaks": "correlated.a_leak_that_starts_late_or_comes_in_steps_is_found",
    "memory: leaks at any age": "correlated.a_leak_of_1_mib_a_step_is_told_within_400_steps_at_any_age",
    "memory: a first verdict after 30 steps": "correlated.thirty_steps_have_a_first_verdict",
    "memory in a log": "watch_says.memory_has_a_verdict_where_it_is_logged",
    "one -1, a mean over stages below zero": "watch_says.every_finding_of_the_monitors_is_one_of_watch",
    "uneven data under BatchNorm": "batch_norm.data_of_other_statistics_on_a_rank_are_told_and_others_are_not",
    "a lag that comes and goes": "symptoms.a_rank_that_lags_is_named",
    "lengths that persist are no lag": "symptoms.lengths_that_differ_and_persist_are_no_lag",
    "timm's top1 and top5": "watch_says.timms_accuracies_are_read_in_percent",
    "faults on two ranks, early and late": "symptoms.a_rank_that_is_off_is_named",
    "curves of splits compared": "watch_findings.a_factor_is_found_on_short_curves",
    "the false loss of a classifier": "never_ends_a_run.the_mean_over_the_items_is_the_truth_of_a_classifier",
    "gradient noise scale": "noise_scale.ragged_micro_batches_give_the_closed_form_where_the_usual_formula_does_not",
    "gradient noise scale on two ranks": "two_ranks.the_noise_scale_over_two_ranks_is_the_closed_form",
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_its_test(row: str) -> None:
    module, name = ROWS[row].split(".")
    assert callable(getattr(import_module(f"tests.monitor.test_{module}"), f"test_{name}"))

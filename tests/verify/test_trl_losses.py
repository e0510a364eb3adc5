"""TRL's GRPO losses, by its own `_compute_loss`, judged by `split_invariance`; the README's table is this one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_accum_fix
from hf_accum_fix.verification.split_invariance import SplitReport, WholeBatch, split_invariance
from tests.verify.test_split_invariance import batch

pytestmark = pytest.mark.slow
grpo = pytest.importorskip("trl.trainer.grpo_trainer", reason="needs trl")

_TYPES = ("grpo", "sapo", "bnpo", "dr_grpo", "luspo", "cispo", "dapo", "vespo")
#: The generation batch is the micro-batch: judged on one rank.
_MICRO = "generates each micro-batch"
#: Row of the table -> what differs from a default training; the row's loss type first.
_ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    **{each: (each, {}) for each in _TYPES},
    "dapo, beta": ("dapo", {"beta": 0.1}),
    "dapo, entropy_coef": ("dapo", {"entropy": 0.1}),
    "dapo, steps_per_generation=1": ("dapo", {_MICRO: True, "steps_per_generation": 1}),
    # What the factor G / steps_per_generation of #6024 makes of it is undone.
    "dapo, steps_per_generation=1, before trl#6024": ("dapo", {_MICRO: True}),
    "dr_grpo, entropy_coef": ("dr_grpo", {"entropy": 0.1}),
}


def _rows() -> dict[str, Tensor]:
    rows = batch()
    return {**rows, "entropies": rows["teacher"].abs().requires_grad_(), "old": rows["logprobs"].detach() + 0.1}


_ALONE = {"gather": lambda x: x, "reduce": lambda x, reduction: x, "gather_for_metrics": lambda x: x}
_ARGUMENTS = {
    "delta": None, "use_bias_correction_kl": False, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
}  # fmt: skip
_USUAL = {
    "epsilon_low": 0.2, "epsilon_high": 0.2, "max_completion_length": 5, "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None, "aux_loss_enabled": False, "use_vllm": False,
    "vllm_importance_sampling_correction": False, "use_adaptive_entropy": False,
    "model": SimpleNamespace(training=True),
}  # fmt: skip


def _loss(kind: str, what: dict[str, Any]) -> Any:
    """``loss_fn(micro_batch, window)`` that calls TRL's method on a trainer without a model."""

    def loss_fn(rows: dict[str, Tensor], window: WholeBatch) -> Tensor:
        steps = what.get("steps_per_generation", window.micro_batches)
        # As TRL counts it: of the generation batch.
        items = (rows if _MICRO in what else window.batch)["mask"].sum()
        trainer = object.__new__(grpo.GRPOTrainer)
        accelerator = SimpleNamespace(num_processes=window.ranks, sync_gradients=False, **_ALONE)
        vars(trainer).update(
            _USUAL, loss_type=kind, importance_sampling_level="sequence" if kind == "luspo" else "token",
            beta=what.get("beta", 0.0), current_gradient_accumulation_steps=window.micro_batches,
            args=SimpleNamespace(**_ARGUMENTS, steps_per_generation=steps), accelerator=accelerator,
            _entropy_bonus_enabled="entropy" in what, entropy_coef=what.get("entropy", 0.0),
            _metrics=defaultdict(lambda: defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (rows["logprobs"], rows["entropies"], None),
        )  # fmt: skip
        empty = torch.zeros(len(rows["mask"]), 0)
        inputs = {
            "prompt_ids": empty, "prompt_mask": empty, "completion_ids": rows["mask"], "completion_mask": rows["mask"],
            "advantages": rows["advantages"][:, 0], "old_per_token_logps": rows["old"],
            "ref_per_token_logps": rows["teacher"], "num_items_in_batch": items,
        }  # fmt: skip
        found: Tensor = trainer._compute_loss(trainer.model, inputs)
        return found

    return loss_fn


def _judged(row: str, **how: Any) -> SplitReport:
    kind, what = _ROWS[row]
    return split_invariance(_loss(kind, what), _rows(), **how)


def _cell(report: SplitReport) -> str:
    return "same" if report else f"{report.off[0][1]:.2g} off"


def _table() -> list[str]:
    lines = []
    for row in _ROWS:
        reports = [_judged(row, uneven=False), _judged(row)]
        several = "-" if _MICRO in _ROWS[row][1] else _cell(_judged(row, ranks=(2, 3), uneven=False))
        named = [each for each in reports[0].words if each.startswith("off: ")]
        why = named[0].partition("_trainer.py:")[2].partition(":")[0] if named else ""
        cells = [f"`{row}`", *map(_cell, reports), several, f"line {why}" if why else ""]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return lines


def test_the_readmes_table_is_measured() -> None:
    readme = Path(hf_accum_fix.__file__).parent / "verification" / "README.md"
    text = readme.read_text(encoding="utf-8")
    missing = [line for line in _table() if line not in text]
    assert not missing, "\n".join(["expected in verification/README.md:", *_table()])

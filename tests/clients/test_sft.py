"""TRL's SFTTrainer: its own loss, its fused head, its collators; every cut takes the full batch's step.

It divides by the number it is handed, which the Trainer hands no head that declares ``accepts_loss_kwargs = False``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import torch
from torch import Tensor, nn
from trl import SFTConfig, SFTTrainer

from hf_accum_fix import observations
from hf_accum_fix.trainer import GlobalBatchTrainer
from tests.clients.words import prompts_and_answers, tokenizer
from tests.logged import Said
from tests.numerics.heads import FLOAT32_LOSS, HEADS, Batch, Head, Sample, llama, seeded
from tests.numerics.heads.head import declared_false
from tests.numerics.heads.samples import text
from tests.numerics.parity import Recorder, Step, applied, cut, reference_step, step_of, training_arguments
from tests.ranks import on_ranks, same_on_all_ranks
from tests.router.conventions import COEFFICIENT, FAMILIES, TWIN, InFloat64, flat, twin, with_coefficient

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
datasets.disable_progress_bars()


@dataclass(frozen=True)
class Way:
    """One way of using SFTTrainer."""

    head: Head  # model, samples, and the loss of a batch of documents
    rows: Sequence[Mapping[str, Any]]  # what SFTTrainer is given: columns of a data set
    config: Mapping[str, Any] = field(default_factory=dict)  # further arguments of SFTConfig
    #: the head's batches in place of TRL's collator; a row then holds the index of its sample
    own_collator: bool = False
    stock_wrong: bool = False  # the stock step is off by more than 1e-3 for the split (2, 4)


def tokens(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    return [{key: sample[key].tolist() for key in ("input_ids", "labels")} for sample in samples]


def indices(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Rows of tokens, each with the index under which the collator finds the whole sample."""
    return [{**row, "index": index} for index, row in enumerate(tokens(samples))]


def completions() -> list[dict[str, Any]]:
    return [{"prompt": row["prompt"], "completion": row["good"]} for row in prompts_and_answers()]


def dft(model: nn.Module, batch: Batch) -> Tensor:
    """Dynamic fine-tuning: every token's loss times its own probability, without gradient through that."""
    labels = batch.pop("labels")[:, 1:]
    log_p = model(**batch)["logits"][:, :-1].double().log_softmax(-1)
    log_p = log_p.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    valid = labels != -100
    return -(log_p * log_p.exp().detach() * valid).sum() / valid.sum()


def lora() -> nn.Module:
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    return peft.get_peft_model(llama(), config)


def ways() -> dict[str, Way]:
    plain, moe = HEADS["llama"], HEADS["qwen3-moe"]
    ragged = tokens(plain.samples)
    twice = text(lengths=(5, 17, 9, 3, 22, 11, 6, 14) * 2, seed=1)
    packed = {"packing": True, "max_length": 24}
    smooth, blank, vl, llava = (HEADS[n] for n in ("llama-smoothing", "llama-empty-micro-batches", "qwen-vl", "llava"))
    as_given = {"dataset_kwargs": {"skip_prepare_dataset": True}}
    return {
        "tokens": Way(plain, ragged),
        "prompt and completion": Way(plain, completions()),
        # TRL's own preparation would drop them.
        "micro-batches without a target": Way(blank, indices(blank.samples), as_given, own_collator=True),
        "padding-free": Way(plain, ragged, {"padding_free": True, "max_length": None}),
        "packed": Way(plain, tokens(twice), packed),
        "packed, wrapped": Way(plain, tokens(twice), {**packed, "packing_strategy": "wrapped"}),
        "dft": Way(replace(plain, loss=dft), ragged, {"loss_type": "dft"}),
        "label smoothing": Way(smooth, ragged, smooth.arguments),
        "LoRA": Way(replace(plain, build=seeded(lora)), ragged),
        "mixture of experts": Way(moe, tokens(moe.samples)),
        "mixture of experts, declared false": Way(
            replace(moe, build=declared_false(moe.build)), tokens(moe.samples), stock_wrong=True
        ),
        "LLaVA": Way(llava, indices(llava.samples), as_given, own_collator=True),
        "Qwen-VL, declared false": Way(vl, indices(vl.samples), as_given, own_collator=True, stock_wrong=True),
    }


WAYS = ways()


def sft_step(way: Way, path: str, per_device: int, accumulate: int, output: Path, **config: Any) -> Step:
    """One step, or more, of SFTTrainer: stock, by the patch or by the subclass, which is put last."""
    given = {"bf16": False, "gradient_checkpointing": False, **way.config, **config}
    args = training_arguments(output, per_device, accumulate, kind=SFTConfig, **given)
    cls = type("SFT", (Recorder, SFTTrainer, *[GlobalBatchTrainer] * (path == "trainer")), {})

    def batch(rows: Sequence[Any]) -> Batch:
        return way.head.batch([way.head.samples[row["index"]] for row in rows])

    def make() -> Any:
        return cls(
            model=way.head.build(),
            args=args,
            train_dataset=datasets.Dataset.from_list(list(way.rows)),
            processing_class=tokenizer(),
            data_collator=batch if way.own_collator else None,
        )

    return step_of(make, path)


def sft_reference(way: Way, trainer: Any, per_device: int) -> Step:
    """The full-batch step over what TRL made of the rows, every document by itself."""
    samples = list(way.head.samples) if way.own_collator else documents(trainer.train_dataset)
    return reference_step(way.head, cut(samples, per_device))


def documents(rows: Any) -> list[Sample]:
    """The documents of prepared rows, of which a packed row holds several."""
    found = []
    for row in rows:
        lengths = row.get("seq_lengths") or [len(row["input_ids"])]
        ids = torch.tensor(row["input_ids"]).split(lengths)
        labels = torch.tensor(row.get("labels", row["input_ids"])).split(lengths)
        found += [
            {"input_ids": one, "attention_mask": torch.ones_like(one), "labels": label}
            for one, label in zip(ids, labels, strict=True)
        ]
    return found


EVERYDAY = (2, 4)
splits = pytest.mark.parametrize(
    "split",
    [EVERYDAY, (1, 8), *(pytest.param(each, marks=pytest.mark.thorough) for each in ((8, 1), (4, 2)))],
    ids=lambda split: "x".join(map(str, split)),
)


def assert_same(step: Step, reference: Step) -> None:
    """TRL's log-probabilities are float32, so everything agrees to its rounding."""
    assert step.error(reference) <= FLOAT32_LOSS
    assert step.loss == pytest.approx(reference.loss, rel=FLOAT32_LOSS)
    assert step.norm == pytest.approx(reference.norm, rel=FLOAT32_LOSS)


@splits
@pytest.mark.parametrize("name", WAYS)
def test_every_cut_takes_the_full_batch_step(name: str, split: tuple[int, int], tmp_path: Path, said: Said) -> None:
    way = WAYS[name]
    step = sft_step(way, "apply", *split, tmp_path)
    reference = sft_reference(way, step.trainer, split[0])
    assert_same(step, reference)
    (run,) = observations.recorded()
    # A head that declares that it takes no number is passed none, by stock neither.
    assert run["exact"] and run["reduction"] == ("mean" if way.stock_wrong else "number")
    assert not said()
    if split == EVERYDAY:
        stock = sft_step(way, "stock", *split, tmp_path)
        assert (stock.error(reference) > 0.4) == way.stock_wrong
        # The log hides it.
        assert stock.loss == pytest.approx(reference.loss, rel=1e-2)
        subclass = sft_step(way, "trainer", *split, tmp_path)
        assert all(torch.equal(step.change[key], subclass.change[key]) for key in step.change)
        assert step.loss == subclass.loss and step.norm == subclass.norm


def test_what_training_runs_is_observed_and_leaves_no_trace_in_the_log(tmp_path: Path) -> None:
    """The fused head, without a cache and with the collator's own inputs: no attention mask, lengths that are ints."""
    way, calls = WAYS["padding-free"], []

    def noted(path: str) -> Any:
        calls.clear()
        build = way.head.build

        def watched() -> torch.nn.Module:
            model = build()
            model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
            return model

        head = replace(way.head, build=watched)
        trainer = sft_step(replace(way, head=head), path, 4, 2, tmp_path).trainer
        return trainer.state.log_history[0]

    stock = noted("stock")
    in_training = [call.keys() for call in calls]
    fixed = noted("apply")
    assert [call.keys() for call in calls] == [in_training[0]] * (len(calls) - len(in_training)) + in_training
    for call in calls:
        assert call["fused_lm_head"] is True and call["use_cache"] is False
        assert isinstance(call["max_length_q"], int) and "attention_mask" not in call
    # Entropy, token accuracy and the number of tokens are kept on the trainer: what was observed is not among them.
    assert {key: fixed[key] for key in ("entropy", "mean_token_accuracy", "num_tokens")} == {
        key: stock[key] for key in ("entropy", "mean_token_accuracy", "num_tokens")
    }


WAYS_ON_TWO_RANKS = ("padding-free", "micro-batches without a target", "mixture of experts, declared false")


def rows_of() -> dict[str, dict[str, Any]]:
    """On each rank: SFTTrainer beside the float64 full batch."""
    rows: dict[str, dict[str, Any]] = {}
    for name in WAYS_ON_TWO_RANKS:
        rows[name] = {}
        for path in ("apply", "stock"):
            step = sft_step(WAYS[name], path, 2, 2, Path(tempfile.gettempdir()) / "sft", ddp_backend="gloo")
            rows[name][path] = step.errors(sft_reference(WAYS[name], step.trainer, 2))
            if path == "apply":
                rows[name]["ranks_agree"] = same_on_all_ranks(step.change)
    return rows


@pytest.mark.timeout(600)
def test_two_ranks_take_the_full_batch_step() -> None:
    for name, row in on_ranks(rows_of, timeout=500)[0].items():
        assert max(row["apply"].values()) <= FLOAT32_LOSS, row
        assert (row["stock"]["gradient"] > 0.1) == WAYS[name].stock_wrong and row["ranks_agree"], row


# --- with a router's loss, which it divides itself, and borrows Mixtral's for every model -----------------------------

FAMILY = "Qwen3-MoE"


def sft(convention: str, per_device: int, coefficient: float, **config: Any) -> Step:
    """One step of SFTTrainer, stock or by the patch under a convention."""
    head = FAMILIES[FAMILY]
    way = Way(with_coefficient(head, coefficient), tokens(head.samples), config)
    with tempfile.TemporaryDirectory() as output, applied("apply" * (convention != "stock"), router_loss=convention):
        return sft_step(way, "stock", per_device, len(head.samples) // per_device, Path(output))


@pytest.mark.parametrize("size", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("config", [{}, {"padding_free": True, "max_length": None}], ids=["padded", "padding-free"])
def test_a_routers_loss_is_that_of_the_full_batch(config: dict[str, Any], size: int) -> None:
    with InFloat64():
        wanted, value = twin(FAMILIES[FAMILY])
        step = sft("exact", size, COEFFICIENT, **config)
        found = flat(step.change) - flat(sft("stock", size, 0.0, **config).change)
    assert float((found - wanted).norm() / wanted.norm()) <= TWIN
    # What TRL logs is the mean of its micro-batches, and so the full batch's as well.
    assert step.trainer.state.log_history[0]["aux_loss"] == pytest.approx(value / COEFFICIENT, rel=1e-9)

"""Losses that couple samples: every split of a window trains the global batch's gradient, and logs its loss."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import hf_accum_fix
from hf_accum_fix import observations
from hf_accum_fix.coupled.cuts import cuts_of
from hf_accum_fix.coupled.whole_window import WholeWindow
from hf_accum_fix.errors import ContractError, OptionsError, RankError, UnsupportedSetupError
from hf_accum_fix.options import BalanceOptions, Options
from tests.coupled import models
from tests.coupled.models import _OWN, MODELS, Coupled, Towers, _of_numbers, descend
from tests.logged import Said
from tests.numerics.parity import (
    ClassRecorder,
    StockRecorder,
    Trained,
    moved,
    relative,
    step_along,
    trainable,
    training_arguments,
)
from tests.ranks import on_ranks

SPLITS = ((8, 1), (4, 2), (2, 4), (3, 3), (1, 8))
TOLERANCE = 1e-12

#: The others show nothing that these do not, but that their class has its row.
EVERYDAY = ("CLIP", "InfoNCE of one's own, found", "supervised, by a compute_loss_func")
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in EVERYDAY else pytest.mark.slow) for name in MODELS]
)
splits = pytest.mark.parametrize("cut", SPLITS, ids=lambda cut: "x".join(map(str, cut)))


@splits
@names
def test_every_split_is_the_global_batch(name: str, cut: tuple[int, int], tmp_path: Path, said: Said) -> None:
    case = MODELS[name]
    reference = step_along(model := case.build(), case.full(model))
    ours = case.train("apply", cut, tmp_path)
    assert ours.error(reference.change) < case.tolerance
    # The log is a number of float32.
    assert ours.losses == [pytest.approx(reference.loss, rel=1e-6)]
    run = observations.recorded()[-1]
    cuts = 0 if cut[1] == 1 else 1 if "GLPN" in name or "pooling" in name else 2
    assert not said() and run["exact"] and len(run["coupled_at"]) == cuts
    if cut[1] > 1 and case.stock_ends:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            case.train("stock", cut, tmp_path)
    elif cut[1] > 1:
        assert case.train("stock", cut, tmp_path).error(reference.change) > 0.05


def test_by_the_subclass_and_without_the_option(tmp_path: Path, said: Said) -> None:
    case = MODELS["CLIP"]
    reference = step_along(model := case.build(), case.full(model))
    kind = type("Coupled", (ClassRecorder,), {"global_batch_options": Options(coupled_loss="exact")})
    assert case.train("trainer", (2, 4), tmp_path, kind=kind).error(reference.change) < TOLERANCE and not said()
    case.train("apply", (2, 4), tmp_path, options={})
    assert len(said("coupled_loss='exact'")) == 1


def test_a_window_at_the_end_of_the_data_is_short(tmp_path: Path) -> None:
    """Eight samples in windows of three micro-batches of two: six, then two."""
    case, model = MODELS["InfoNCE of one's own"], MODELS["InfoNCE of one's own"].build()
    wanted = descend(model, [lambda at=at: case.full(model, case.samples[at]) for at in (slice(6), slice(6, 8))])
    ours = case.train("apply", (2, 3), tmp_path, max_steps=2, learning_rate=0.05)
    assert ours.error(wanted) < TOLERANCE


def test_dropout_draws_the_same_masks_in_both_passes(tmp_path: Path, said: Said) -> None:
    case = dataclasses.replace(MODELS["InfoNCE of one's own"], make=lambda: Towers(dropout=0.5))
    trained = case.train("apply", (2, 4), tmp_path)
    drift = trained.trainer._hf_accum_fix_session.coupled.losses["vectors"]
    assert len(drift) == 9 and {*map(float, drift)} == {1.0} and not said()


def test_gradient_checkpointing_clipping_and_lora(tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    case = MODELS["CLIP"]

    def build() -> nn.Module:
        torch.manual_seed(0)
        adapted = get_peft_model(case.make().double(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
        return adapted.double()  # type: ignore[no-any-return]

    reference = step_along(model := build(), case.full(model))
    given = {"gradient_checkpointing": True, "max_grad_norm": 0.5}
    ours = case.train("apply", (2, 4), tmp_path, model=build(), **given)
    clipped = {name: each * min(1.0, 0.5 / (reference.norm + 1e-6)) for name, each in reference.change.items()}
    assert ours.error(clipped) < 1e-9
    assert ours.history[0]["grad_norm"] == pytest.approx(reference.norm, rel=1e-5)


def test_sums_of_16_bit_gradients_go_with_it(tmp_path: Path) -> None:
    case = MODELS["InfoNCE of one's own"]
    reference = step_along(model := case.build(torch.bfloat16).double(), case.full(model))
    rows = [{key: each.bfloat16() for key, each in row.items()} for row in case.samples]
    short = dataclasses.replace(case, samples=rows)
    options = {"coupled_loss": "exact", **case.options, "accumulate_in": "float32"}
    ours = short.train(
        "apply", (2, 4), tmp_path, model=short.build(torch.bfloat16), options=options, learning_rate=2**-3
    )
    found = {name: each * 8 for name, each in ours.change.items()}
    # bfloat16 has 8 bits, and the parameters are rounded to it.
    assert relative(found, reference.change) < 0.15


class Leaks(Towers):
    """A second loss, on the micro-batch's own inputs."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return {"loss": super().forward(x, y)["loss"] * (1 + x.square().mean())}


REFUSED = {
    "BatchNorm": (lambda: Towers(norm=True), ("one", "other"), "BatchNorm in training mode (one.1)"),
    "none that is found": (models.RootOfMean, (), "cut at encoder cannot be run"),
    "a queue": (models.Queue, (), "a forward keeps a state, as a queue or a moving average (['queue'])"),
    "a moving average": (models.Averaged, ("one", "other", "key"), "average (['key.weight', 'key.bias'])"),
    "what its vectors do not show": (Leaks, ("one", "other"), "gradient is"),
    "no such module": (Towers, ("nobody",), "names 0 modules"),
    "one tower of two": (Towers, ("one",), "cut at one cannot be run"),
    "what has no vectors": (models.RootOfMean, ("encoder",), "cut at encoder cannot be run"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    make, coupled, why = REFUSED[name]
    case = dataclasses.replace(MODELS["InfoNCE of one's own"], make=make, options={"coupled": coupled})
    # As from_pretrained leaves it; the trainer sets it to training.
    model = case.build().eval()
    before = trainable(model)
    with pytest.raises(UnsupportedSetupError, match=re.escape(why)):
        case.train("apply", (2, 4), tmp_path, model=model)
    assert relative(trainable(model), before) == 0.0


def test_vectors_that_a_function_makes_are_refused_with_the_line_to_write(tmp_path: Path) -> None:
    case = MODELS["mean pooling, padded to the longest"]
    words = r"no module of which is known, or found.* x = self\.vectors\(x\) in forward"
    with pytest.raises(UnsupportedSetupError, match=words):
        dataclasses.replace(case, make=lambda: models.Pooled(as_module=False)).train("apply", (2, 4), tmp_path)


class Weighted(Coupled):
    """Weights, which the loss reads past the vectors; from the fifth sample's micro-batch on others."""

    made: Any = staticmethod(lambda weights: weights)

    def batch(self, samples: Any) -> dict[str, Any]:
        batch = super().batch(samples)
        fifth = batch["y"][:, 0] == self.samples[4]["y"][0]
        return {**batch, "weights": self.made(torch.where(fifth, 3.0, 1.0))}


class Numbers(Weighted):
    """One a micro-batch, on each rank others."""

    made = staticmethod(lambda weights: int(weights.max()) + (dist.get_rank() if dist.is_initialized() else 0))


class Lists(Weighted):
    made = staticmethod(lambda weights: [float(weights.max())])


class Weighs(Towers):
    def forward(self, x: Tensor, y: Tensor, weights: Any) -> dict[str, Tensor]:
        return {"loss": super().forward(x, y)["loss"] * torch.as_tensor(weights, dtype=x.dtype).mean()}


class Ragged(Coupled):
    """From the fifth sample on one more vector a sample."""

    def batch(self, samples: Any) -> dict[str, Any]:
        batch = super().batch(samples)
        many = any(each is samples[0] for each in self.samples[4:])
        return {**batch, "y": batch["y"][:, None].expand(-1, 1 + many, -1)}


@pytest.mark.parametrize("kind", [Weighted, Numbers, Lists])
def test_every_micro_batch_is_run_before_the_first_step(kind: Any, tmp_path: Path) -> None:
    """The trial joins two, which may have the same weight."""
    case = kind(Weighs, _of_numbers(), options=_OWN)
    before = trainable(model := case.build())
    with pytest.raises((ContractError, UnsupportedSetupError), match=r"vary in .*weights|gradient is"):
        case.train("apply", (2, 4), tmp_path, model=model)
    assert relative(trainable(model), before) == 0.0


KINDS = [(Weighted, Weighs), (Numbers, Weighs), (Lists, Weighs), (Ragged, models.Passages)]


@pytest.mark.parametrize(("kind", "make"), KINDS)
def test_a_later_window_that_is_unlike_the_first_trains_as_without_the_option(
    kind: Any, make: Any, tmp_path: Path, said: Said
) -> None:
    """To float64's last bits: the micro-batches are averaged in another order."""
    case = kind(make, _of_numbers())
    batches, model = case.batches(2), case.build()
    windows = ([case.batch(case.samples[:4])], batches[2:])
    wanted = descend(model, [lambda its=its: sum(model(**each)["loss"] / len(its) for each in its) for its in windows])
    ours = case.train("apply", (2, 2), tmp_path, max_steps=2, learning_rate=0.05)
    assert ours.error(wanted) < TOLERANCE
    (warning,) = said()
    assert "(step 2) is unlike those before, and trains as without coupled_loss" in warning
    assert not observations.recorded()[-1]["exact"]


def test_an_input_that_only_later_varies_is_tried_again(tmp_path: Path, said: Said) -> None:
    """And stays exact where the loss does not read it."""

    class Ignores(Towers):
        def forward(self, x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Tensor]:
            return super().forward(x, y)

    case = Weighted(Ignores, _of_numbers())
    case.train("apply", (2, 2), tmp_path, max_steps=2, learning_rate=0.05)
    assert not said() and observations.recorded()[-1]["exact"]


@pytest.mark.parametrize("name", ["InfoNCE of one's own", "InfoNCE of one's own, found"])
def test_the_trial_needs_no_more_memory_than_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs the samples of two micro-batches at once, or the halves of one; single ones are no halves."""
    forward, most = Towers.forward, 2

    def out_of_memory(self: Towers, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if len(x) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, x, y)

    case = MODELS[name]
    reference = step_along(model := case.build(), case.full(model))
    monkeypatch.setattr(Towers, "forward", out_of_memory)
    assert case.train("apply", (2, 4), tmp_path).error(reference.change) < TOLERANCE
    most = 1
    with pytest.raises(UnsupportedSetupError, match="out of memory; use smaller micro-batches"):
        case.train("apply", (1, 8), tmp_path)


@pytest.mark.parametrize("cut", [(4, 2), (1, 8)])
def test_noise_before_the_vectors_is_no_difference(cut: tuple[int, int], tmp_path: Path, said: Said) -> None:
    """Such as a drop path, or NEFTune."""

    class Noisy(Towers):
        def vectors(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            return super().vectors(x + torch.randn_like(x), y * (torch.rand(len(y), 1) < 0.8))

    for options in (_OWN, {}):
        dataclasses.replace(MODELS["InfoNCE of one's own"], make=Noisy, options=options).train("apply", cut, tmp_path)
        assert not said() and observations.recorded()[-1]["exact"]


def test_the_first_window_that_is_cut_is_tried(tmp_path: Path) -> None:
    """One of a single micro-batch is the stock Trainer's."""
    case = dataclasses.replace(MODELS["InfoNCE of one's own"], options={"coupled": ("one",)})
    reference = step_along(model := case.build(), case.full(model))
    assert case.train("apply", (8, 1), tmp_path).error(reference.change) < TOLERANCE
    batches, trained = case.batches(2), 0
    with pytest.raises(UnsupportedSetupError, match="cut at one cannot be run"):
        for of, steps in ((batches[:1], 1), (batches[1:], 3)):
            trained += len([*case.loop(model, of, steps)])
    assert trained == 1


def test_a_whole_name_is_one_modules() -> None:
    """A module below it may end with the same."""
    model = nn.ModuleDict({"encoder": nn.ModuleDict({"bert": nn.ModuleDict({"encoder": nn.Linear(2, 2)})})})
    assert cuts_of(model, ["encoder"]) == {"encoder": model["encoder"]}
    assert list(cuts_of(model, ["bert.encoder"])) == ["encoder.bert.encoder"]


def test_what_weights_samples_does_not_go_with_it() -> None:
    with pytest.raises(OptionsError, match="expected only one of them"):
        Options(coupled_loss="exact", drop_duplicates=True)
    with pytest.raises(OptionsError, match="a tuple of module names"):
        Options(coupled="one")  # type: ignore[arg-type]
    with pytest.raises(OptionsError, match="which reads no module; expected 'rank' or 'exact'"):
        Options(coupled=("one",))


OTHER_CUTS = [pytest.param(cut, marks=pytest.mark.thorough) for cut in ((4, 1), (1, 4))]
OTHERS = [pytest.param(name, marks=pytest.mark.thorough) for name in ("SigLIP", "InfoNCE of one's own")]
OWN = "InfoNCE of one's own"


def _on_a_rank(name: str, cut: tuple[int, int], convention: str, folder: str) -> Trained:
    case = MODELS[name]
    options = {"coupled_loss": convention, **case.options}
    return case.train("apply" if convention else "stock", cut, Path(folder), options=options)


def _of_ranks(name: str, cut: tuple[int, int], folder: str) -> list[tuple[dict[str, Tensor], list[float]]]:
    """By ours and by stock, the change and what is logged."""
    return [(each.change, each.losses) for each in (_on_a_rank(name, cut, how, folder) for how in ("exact", ""))]


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(2, 2), *OTHER_CUTS], ids=lambda cut: "x".join(map(str, cut)))
# gloo adds no bools.
@pytest.mark.parametrize("name", ["CLIP", "supervised contrastive", "two classes by a flag", *OTHERS])
def test_two_ranks_are_the_global_batch(name: str, cut: tuple[int, int], tmp_path: Path) -> None:
    case = MODELS[name]
    reference = step_along(model := case.build(), case.full(model))
    for (change, losses), (stock, _) in on_ranks(_of_ranks, name, cut, str(tmp_path)):
        assert relative(change, reference.change) < TOLERANCE and relative(stock, reference.change) > 0.05
        assert losses in ([], [pytest.approx(reference.loss, rel=1e-6)])


def _weighted(folder: str) -> str:
    with pytest.raises(ContractError) as found:
        Numbers(Weighs, _of_numbers(), options=_OWN).train("apply", (1, 2), Path(folder))
    return str(found.value)


def _fails_on_one(folder: str) -> str:
    """Its second rank's labels cannot be read in the pass that collects."""
    collect = WholeWindow.collect

    def failing(self: WholeWindow, batches: Any, forward: Any) -> None:
        if dist.get_rank() == 1:
            raise ContractError("got a fault; expected none; look here")
        collect(self, batches, forward)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WholeWindow, "collect", failing)
        try:
            _on_a_rank(OWN, (2, 2), "rank", folder)
        except (ContractError, RankError) as error:
            return type(error).__name__
    return "trained"


def _all(folder: str) -> tuple[str, str, dict[str, Tensor], list[float]]:
    ours = _on_a_rank(OWN, (2, 2), "rank", folder)
    return _weighted(folder), _fails_on_one(folder), ours.change, ours.losses


@pytest.mark.slow
def test_each_rank_alone_other_inputs_on_each_and_one_that_fails(tmp_path: Path) -> None:
    """As stock's DDP with one micro-batch: the mean over ranks of the losses of each rank's samples.

    An input of another value on each is refused; if one fails alone, the others would wait for it in the backward.
    """
    case = MODELS[OWN]
    # accelerate deals batches to ranks by turns.
    halves = [[each for at, each in enumerate(case.samples) if at // 2 % 2 == rank] for rank in (0, 1)]
    model = case.build()
    reference = step_along(model, (case.full(model, halves[0]) + case.full(model, halves[1])) / 2)
    found = on_ranks(_all, str(tmp_path), patience=60)
    for why, _, change, losses in found:
        assert "losses, or vectors" in why
        assert relative(change, reference.change) < TOLERANCE
        assert losses in ([], [pytest.approx(reference.loss, rel=1e-6)])
    assert [failed for _, failed, *_ in found] == ["RankError", "ContractError"]


@splits
def test_a_loop_of_ones_own(cut: tuple[int, int], said: Said) -> None:
    case = MODELS["supervised contrastive"]
    reference = step_along(model := case.build(), case.full(model))
    model = case.build()
    before, optimizer = trainable(model), torch.optim.SGD(model.parameters(), lr=1.0)
    for window in case.loop(model, case.batches(cut[0]), cut[1]):
        optimizer.step()
        assert float(window.mean_loss()) == pytest.approx(reference.loss, rel=1e-12)
    # The trial's gradients are none that the check at the optimizer counts.
    assert not said() and observations.recorded()[-1]["exact"]
    assert relative(moved(model, before), reference.change) < TOLERANCE


def test_a_loop_goes_on_where_collecting_fails(monkeypatch: pytest.MonkeyPatch, said: Said) -> None:
    """As without this package: the mean over micro-batches."""
    case = MODELS["supervised contrastive"]
    batches, reference = case.batches(2), case.build()
    for batch in batches:
        (reference(**batch)["loss"] / len(batches)).backward()
    collect = WholeWindow.collect

    def fails(self: WholeWindow, of: Any, forward: Any) -> None:
        # What is tried before has two micro-batches at most.
        if len(of) > 2:
            raise RuntimeError("a fault of ours")
        collect(self, of, forward)

    monkeypatch.setattr(WholeWindow, "collect", fails)
    model = case.build()
    assert len([*case.loop(model, batches, len(batches))]) == 1
    found, wanted = ({name: each.grad for name, each in m.named_parameters()} for m in (model, reference))
    assert relative(found, wanted) < TOLERANCE and len(said("please report")) == 1


def test_length_balanced_windows(tmp_path: Path) -> None:
    case = MODELS["supervised contrastive"]
    reference = step_along(model := case.build(), case.full(model))
    lengths = BalanceOptions(lengths=lambda row: 3 + 4 * int(row["labels"]))
    options = {"coupled_loss": "exact", **case.options, "balance_windows": lengths}
    assert case.train("apply", (2, 4), tmp_path, options=options).error(reference.change) < TOLERANCE


def test_verify_calls_it_exact_and_names_the_option_without_it(tmp_path: Path) -> None:
    case, found, args = MODELS["InfoNCE of one's own"], dict[bool, Any](), training_arguments(tmp_path, 2, 4)
    given: dict[str, Any] = {"train_dataset": list(case.samples), "data_collator": case.batch}
    for is_on in (True, False):
        with hf_accum_fix.apply(**({"coupled_loss": "exact", **case.options} if is_on else {})):
            found[is_on] = hf_accum_fix.verify(StockRecorder(model=case.build(), args=args, **given))
    assert str(found[True]).startswith("exact at your 2 x 4")
    assert "coupled_loss='exact'" in str(found[False])

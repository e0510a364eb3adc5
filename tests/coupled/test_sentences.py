"""sentence-transformers' own trainer and losses, left as they are, over the whole window."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accum_fix
from hf_accum_fix.errors import UnsupportedSetupError
from tests.cli.processes import ROOT, RUN, environment, start
from tests.clients.test_sentence_transformers import OBJECTIVES, weights
from tests.clients.words import prompts_and_answers
from tests.logged import Said
from tests.numerics.parity import Trained, relative, train, trainable, training_arguments
from tests.ranks import on_ranks

pytestmark = pytest.mark.slow

SPLITS = ((4, 2), (2, 4), (3, 3), (1, 8))


def guided(losses: Any, model: Any) -> Any:
    """Negatives that a second model calls too similar are left out."""
    torch.manual_seed(1)
    guide = copy.deepcopy(model)
    for each in guide.parameters():
        each.data += 0.1 * torch.randn_like(each)
    return losses.GISTEmbedLoss(model, guide)


#: By name: what makes the loss of a model.
LOSSES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "MNRL": ("in-batch negatives", lambda losses, model: losses.MultipleNegativesRankingLoss(model)),
    "MNRL, both ways": (
        "in-batch negatives",
        lambda losses, model: losses.MultipleNegativesSymmetricRankingLoss(model),
    ),
    "CoSENT": ("order of similarities", lambda losses, model: losses.CoSENTLoss(model)),
    "AnglE": ("order of similarities", lambda losses, model: losses.AnglELoss(model)),
    "Matryoshka of MNRL": (
        "in-batch negatives",
        lambda losses, model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
    ),
    "GIST": ("in-batch negatives", guided),
}


HARD = "with a hard negative"


def hard() -> list[dict[str, str]]:
    return [{"anchor": row["prompt"], "positive": row["good"], "negative": row["bad"]} for row in prompts_and_answers()]


def apart(losses: Any, model: Any) -> Any:
    """Each column has a forward of its own."""
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled

    loss = losses.MultipleNegativesRankingLoss(model)
    loss.forward = column_merging_disabled()(loss.forward)
    return loss


LOSSES["MNRL with a hard negative, columns apart"] = (HARD, apart)

REFUSED: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "MNRL with a hard negative": (HARD, lambda losses, model: losses.MultipleNegativesRankingLoss(model)),
    "Matryoshka of it": (
        HARD,
        lambda losses, model: losses.MatryoshkaLoss(model, losses.MultipleNegativesRankingLoss(model), [16, 8]),
    ),
    **{
        kind: ("in-batch negatives", lambda losses, model, kind=kind: getattr(losses, kind)(model))
        for kind in ("CachedMultipleNegativesRankingLoss", "CachedMultipleNegativesSymmetricRankingLoss")
    },
    "Cached, in small forwards": (
        "in-batch negatives",
        lambda losses, model: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=1),
    ),
    "Matryoshka of Cached": (
        "in-batch negatives",
        lambda losses, model: losses.MatryoshkaLoss(model, losses.CachedMultipleNegativesRankingLoss(model), [16, 8]),
    ),
    "CachedGIST": (
        "in-batch negatives",
        lambda losses, model: losses.CachedGISTEmbedLoss(model, copy.deepcopy(model)),
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("sentences"))


def trained(
    name: str, path: str, cut: tuple[int, int], folder: Path, given: Mapping[str, Any] | None = None, **options: Any
) -> Trained:
    return train(maker(name, cut, folder, **(given or {})), path, **options)


def maker(name: str, cut: tuple[int, int], folder: Path, **given: Any) -> Callable[[], Any]:
    """What makes a trainer of a loss; ``given``: more arguments of its training."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    objective, loss = (LOSSES | REFUSED)[name]
    args = training_arguments(folder, *cut, kind=st.SentenceTransformerTrainingArguments, **given)

    def make() -> Any:
        torch.manual_seed(0)
        encoder = Transformer(str(folder))
        modules = [encoder, Pooling(encoder.get_embedding_dimension())]
        model = st.SentenceTransformer(modules=modules, device="cpu").double()
        rows = Dataset.from_list([dict(row) for row in (hard() if objective == HARD else OBJECTIVES[objective].rows())])
        return st.SentenceTransformerTrainer(model=model, args=args, train_dataset=rows, loss=loss(losses, model))

    return make


@pytest.mark.parametrize("cut", SPLITS, ids=lambda cut: "x".join(map(str, cut)))
@pytest.mark.parametrize("name", LOSSES)
def test_every_split_is_the_global_batch(name: str, cut: tuple[int, int], folder: Path, said: Said) -> None:
    reference = trained(name, "stock", (8, 1), folder)
    ours = trained(name, "apply", cut, folder, coupled_loss="exact")
    assert ours.error(reference.change) < 1e-9 and not said()
    assert ours.losses == [pytest.approx(reference.losses[0], rel=1e-5)]
    assert trained(name, "stock", cut, folder).error(reference.change) > 0.05


@pytest.mark.parametrize("prompts", [None, {"anchor": "ask: ", "positive": "say: ", "negative": "say: "}])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_before_the_first_step(
    name: str, prompts: dict[str, str] | None, folder: Path
) -> None:
    trainer = maker(name, (4, 2), folder, **({"prompts": prompts} if prompts else {}))()
    before = trainable(trainer.model)
    why = "other rows from the model, call 2, or in another order" if "Cached" not in name else "Cached loss|call "
    with hf_accum_fix.apply(coupled_loss="exact"), pytest.raises(UnsupportedSetupError, match=why):
        trainer.train()
    assert relative(trainable(trainer.model), before) == 0.0
    assert trainer.state.global_step == 0 and not any(p.grad is not None for p in trainer.model.parameters())


def _on_a_rank(name: str, cut: tuple[int, int], folder: str) -> dict[str, torch.Tensor]:
    return trained(name, "apply", cut, Path(folder), coupled_loss="exact").change


def test_two_ranks_are_the_global_batch(folder: Path) -> None:
    reference = trained("MNRL", "stock", (8, 1), folder)
    for change in on_ranks(_on_a_rank, "MNRL", (2, 2), str(folder)):
        assert relative(change, reference.change) < 1e-9


def test_an_unedited_script_under_the_command(folder: Path, tmp_path: Path) -> None:
    """In float32: the library's own sums differ by some 1e-6."""
    found = []
    coupled = [*RUN, "--coupled-loss", "exact"]
    for before, rows, steps in (([], 8, 1), (coupled, 2, 4), ([], 2, 4)):
        out = tmp_path / f"{len(found)}"
        out.mkdir()
        words = [Path(__file__).with_name("sentences_script.py"), folder, str(rows), str(steps), out]
        done = start([*before, sys.executable, *words], environment(ROOT))
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(torch.load(out / "moved.pt"))
    whole, ours, stock = found
    assert relative(ours, whole) < 1e-5 < 0.05 < relative(stock, whole)


@pytest.mark.parametrize("negatives", [2, None])
def test_a_cross_encoder_is_refused_before_the_first_step(negatives: int | None, folder: Path) -> None:
    """It reads a pair as one input, and makes new pairs of a micro-batch's texts inside of its loss."""
    from datasets import Dataset
    from sentence_transformers import CrossEncoder, cross_encoder

    args = training_arguments(folder, 2, 4, kind=cross_encoder.CrossEncoderTrainingArguments)
    torch.manual_seed(0)
    model = CrossEncoder(str(folder), num_labels=1, device="cpu").double()
    loss = cross_encoder.losses.MultipleNegativesRankingLoss(model, num_negatives=negatives)
    rows = Dataset.from_list([dict(row) for row in OBJECTIVES["in-batch negatives"].rows()])
    trainer = cross_encoder.CrossEncoderTrainer(model=model, args=args, train_dataset=rows, loss=loss)
    before = trainable(model)
    with hf_accum_fix.apply(coupled_loss="exact"), pytest.raises(UnsupportedSetupError, match="coupled_loss='exact'"):
        trainer.train()
    assert relative(trainable(model), before) == 0.0

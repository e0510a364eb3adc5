"""sentence-transformers' own trainer and losses, left as they are, over the whole window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_accum_fix
from hf_accum_fix.errors import UnsupportedSetupError
from tests.clients.test_sentence_transformers import OBJECTIVES, weights
from tests.clients.words import prompts_and_answers
from tests.logged import Said
from tests.numerics.parity import Trained, relative, train, trainable, training_arguments
from tests.ranks import on_ranks, selected

pytestmark = pytest.mark.slow

SPLITS = ((4, 2), (2, 4), (3, 3), (1, 8))


def guided(losses: Any, model: Any) -> Any:
    """Negatives that a second model calls too similar are left out."""
    torch.manual_seed(1)
    guide = copy.deepcopy(model)
    for each in guide.parameters():
        each.data += 0.1 * torch.randn_like(each)
    return losses.GISTEmbedLoss(model, guide)


def of(name: str, **given: Any) -> Callable[[Any, Any], Any]:
    return lambda losses, model: getattr(losses, name)(model, **given)


MNRL = of("MultipleNegativesRankingLoss")


def around(name: str, **given: Any) -> Callable[[Any, Any], Any]:
    """Matryoshka and its like, of MNRL."""
    return lambda losses, model: getattr(losses, name)(model, MNRL(losses, model), [16, 8, 4], **given)


def triples(negatives: int = 1) -> list[dict[str, Any]]:
    """Pairs with negatives of their own, and a margin to learn."""
    rows = prompts_and_answers()
    bad = [{f"negative_{k}": rows[(at + k) % len(rows)]["bad"] for k in range(negatives)} for at in range(len(rows))]
    return [{"anchor": row["prompt"], "positive": row["good"], **its} for row, its in zip(rows, bad, strict=True)]


def apart(losses: Any, model: Any) -> Any:
    """Each column has a forward of its own."""
    from sentence_transformers.base.losses.merged_forward import column_merging_disabled

    loss = MNRL(losses, model)
    loss.forward = column_merging_disabled()(loss.forward)
    return loss


def adapted(losses: Any, model: Any) -> Any:
    """With LoRA."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    config = LoraConfig(target_modules=["query", "value"], init_lora_weights=False)
    model[0].auto_model = get_peft_model(model[0].auto_model, config)
    model.double()
    return MNRL(losses, model)


#: Rows that are no `OBJECTIVES`.
ROWS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "classes": lambda: [{"text": row["prompt"], "label": at % 2} for at, row in enumerate(prompts_and_answers())],
    "triples": triples,
    "five negatives": lambda: triples(5),
    "margins": lambda: [{**row, "label": 0.1 * at - 0.3} for at, row in enumerate(triples())],
}
#: By name: the rows, and what makes the loss of a model.
LOSSES: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "MNRL": ("in-batch negatives", MNRL),
    "MNRL, both ways": ("in-batch negatives", of("MultipleNegativesSymmetricRankingLoss")),
    "CoSENT": ("order of similarities", of("CoSENTLoss")),
    "AnglE": ("order of similarities", of("AnglELoss")),
    "Matryoshka of MNRL": ("in-batch negatives", around("MatryoshkaLoss")),
    "GIST": ("in-batch negatives", guided),
    "MNRL with a negative": ("triples", MNRL),
    "MNRL with five negatives": ("five negatives", MNRL),
    "MNRL with a negative, columns apart": ("triples", apart),
    "MNRL with a negative, LoRA": ("triples", adapted),
    "Matryoshka with a negative": ("triples", around("MatryoshkaLoss")),
    "GOR of three columns": ("triples", of("GlobalOrthogonalRegularizationLoss")),
    "GIST with a negative": ("triples", guided),
    "triplets of classes": ("classes", of("BatchAllTripletLoss")),
    "hard triplets of classes": ("classes", of("BatchHardTripletLoss")),
}
#: Means over samples, which no cut changes.
PLAIN = {"MarginMSE": ("margins", of("MarginMSELoss")), "cosine": ("cosine similarity", of("CosineSimilarityLoss"))}
#: A loss that gathers over ranks itself.
GATHERS = {"gathers": ("triples", of("MultipleNegativesRankingLoss", gather_across_devices=True))}
CACHED, DRAWS = "use the loss without Cached in its name", "use MatryoshkaLoss, n_dims_per_step=-1"
REFUSED: dict[str, tuple[str, Callable[[Any, Any], Any], str]] = {
    "Cached": ("triples", of("CachedMultipleNegativesRankingLoss", mini_batch_size=1), CACHED),
    "Cached, both ways": ("triples", of("CachedMultipleNegativesSymmetricRankingLoss", mini_batch_size=1), CACHED),
    "a dimension a step": ("triples", around("MatryoshkaLoss", n_dims_per_step=1), DRAWS),
    "Matryoshka2d": ("triples", around("Matryoshka2dLoss"), DRAWS),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return weights(tmp_path_factory.mktemp("sentences"))


def trained(
    name: str, path: str, cut: tuple[int, int], folder: Path, given: Mapping[str, Any] | None = None, **options: Any
) -> Trained:
    return train(maker(name, cut, folder, **(given or {})), path, **options)


def maker(name: str, cut: tuple[int, int], folder: Path, data: Any = None, **given: Any) -> Callable[[], Any]:
    """What makes a trainer of a loss, of its rows or other ``data``; ``given``: more arguments of its training."""
    import sentence_transformers as st
    from datasets import Dataset
    from sentence_transformers.sentence_transformer import losses
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    objective, loss, *_ = (LOSSES | PLAIN | REFUSED | GATHERS)[name]
    args = training_arguments(folder, *cut, kind=st.SentenceTransformerTrainingArguments, **given)

    def make() -> Any:
        torch.manual_seed(0)
        encoder = Transformer(str(folder))
        modules = [encoder, Pooling(encoder.get_embedding_dimension())]
        model = st.SentenceTransformer(modules=modules, device="cpu").double()
        rows = (ROWS[objective] if objective in ROWS else OBJECTIVES[objective].rows)()
        of_rows = Dataset.from_list([dict(row) for row in rows]) if data is None else data
        return st.SentenceTransformerTrainer(model=model, args=args, train_dataset=of_rows, loss=loss(losses, model))

    return make


#: One loss at every split, the others at an even one and where the last micro-batch is short.
CELLS = [
    *(("MNRL with a negative", cut) for cut in SPLITS),
    *((name, cut) for name in LOSSES | PLAIN for cut in ((2, 4), (3, 3)) if name != "MNRL with a negative"),
]


@pytest.mark.parametrize(("name", "cut"), CELLS)
def test_every_split_is_the_global_batch(name: str, cut: tuple[int, int], folder: Path, said: Said) -> None:
    """To float64's rounding: padding to another length adds zeros in another order."""
    reference = trained(name, "stock", (8, 1), folder)
    ours = trained(name, "apply", cut, folder, coupled_loss="exact")
    assert ours.error(reference.change) < 1e-9 and not said()
    assert ours.losses == [pytest.approx(reference.losses[0], rel=1e-5)]
    assert name in PLAIN or trained(name, "stock", cut, folder).error(reference.change) > 0.05


PROMPTS = {"prompts": {"anchor": "w1 w2 ", "positive": "w3 ", "negative_0": "w3 "}}
GIVEN = [PROMPTS, {"gradient_checkpointing": True}, {"batch_sampler": "no_duplicates"}, {"bf16": True}]


@pytest.mark.parametrize("cut", [(2, 4), (3, 3)], ids=lambda cut: "x".join(map(str, cut)))
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: next(iter(given)))
def test_as_people_train(given: dict[str, Any], cut: tuple[int, int], folder: Path, said: Said) -> None:
    """bfloat16 has 8 bits. NO_DUPLICATES shuffles: only what is said is looked at."""
    name = "MNRL with a negative"
    reference = trained(name, "stock", (8, 1), folder, given)
    ours = trained(name, "apply", cut, folder, given, coupled_loss="exact")
    if "batch_sampler" in given:
        (warning,) = said()
        assert "NO_DUPLICATES" in warning
        return
    assert ours.error(reference.change) < (0.1 if "bf16" in given else 1e-9) and not said()


def test_two_data_sets_by_turns(folder: Path, said: Said) -> None:
    """Each has the loss of all its samples in a window, as much of it as its micro-batches are."""
    from datasets import Dataset, DatasetDict
    from sentence_transformers.sentence_transformer.training_args import MultiDatasetBatchSamplers

    name, changes = "MNRL with a negative", []
    sets = {"two": OBJECTIVES["in-batch negatives"].rows()[:4], "three": triples()[4:]}
    for names, path, cut, options in (
        (["two"], "stock", (4, 1), {}),
        (["three"], "stock", (4, 1), {}),
        (sets, "apply", (2, 4), {"coupled_loss": "exact"}),
        (sets, "stock", (2, 4), {}),
    ):
        data = DatasetDict({key: Dataset.from_list([dict(row) for row in sets[key]]) for key in names})
        given = {"multi_dataset_batch_sampler": MultiDatasetBatchSamplers.ROUND_ROBIN}
        changes.append(train(maker(name, cut, folder, data, **given), path, **options).change)
    two, three, ours, stock = changes
    wanted = {key: (two[key] + three[key]) / 2 for key in two}
    assert relative(ours, wanted) < 1e-9 < 0.05 < relative(stock, wanted) and not said()


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_exact_is_refused_before_the_first_step(name: str, folder: Path) -> None:
    trainer = maker(name, (4, 2), folder)()
    before = trainable(trainer.model)
    with hf_accum_fix.apply(coupled_loss="exact"), pytest.raises(UnsupportedSetupError, match=REFUSED[name][2]):
        trainer.train()
    assert relative(trainable(trainer.model), before) == 0.0
    assert trainer.state.global_step == 0 and not any(p.grad is not None for p in trainer.model.parameters())


#: Of two ranks: the loss, the cut, the option, and what else is given.
ON_TWO: dict[str, tuple[str, tuple[int, int], str, dict[str, Any]]] = {
    **{f"MNRL {b}x{g}": ("MNRL with a negative", (b, g), "exact", {}) for b, g in ((4, 1), (2, 2), (1, 4))},
    **{name: (name, (2, 2), "exact", {}) for name in ("GIST with a negative", "MNRL with a negative, LoRA")},
    "gathers, by rank": ("gathers", (2, 2), "rank", {}),
    "gathers": ("gathers", (2, 2), "exact", {}),
    "triplets": ("triplets of classes", (2, 2), "exact", {}),
    **{next(iter(given)): ("MNRL with a negative", (2, 2), "exact", given) for given in (*GIVEN[:2], GIVEN[3])},
}


def _on_a_rank(cases: Sequence[str], folder: str) -> dict[str, Any]:
    """By case the change, or what is said."""
    found: dict[str, Any] = {}
    for case in cases:
        name, cut, convention, given = ON_TWO[case]
        try:
            found[case] = trained(name, "apply", cut, Path(folder), given, coupled_loss=convention).change
        except UnsupportedSetupError as error:
            found[case] = str(error)
    return found


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest, folder: Path) -> list[dict[str, Any]]:
    return on_ranks(_on_a_rank, selected(request), str(folder))


@pytest.mark.parametrize("case", ON_TWO)
def test_two_ranks(case: str, folder: Path, of_ranks: list[dict[str, Any]]) -> None:
    """The global batch, or refused: who gathers over ranks by itself gets the window's vectors of its own rank.

    Triplets call a model of which DDP averages nothing.
    """
    name, _, _, given = ON_TWO[case]
    reference = trained("MNRL with a negative" if name == "gathers" else name, "stock", (8, 1), folder, given)
    for change in (rank[case] for rank in of_ranks):
        if case == "gathers":
            assert "runs a collective itself" in change and "coupled_loss='rank'" in change
        elif case == "triplets":
            assert "past DistributedDataParallel" in change
        else:
            assert relative(change, reference.change) < (0.1 if "bf16" in given else 1e-9)


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

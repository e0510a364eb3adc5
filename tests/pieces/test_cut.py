"""How a micro-batch is cut, and one of each kind of failure; all heads are in `test_in_pieces`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
from accelerate.utils import DistributedType

import hf_accum_fix
from hf_accum_fix.errors import OptionsError, UnsupportedSetupError
from hf_accum_fix.options import Options
from hf_accum_fix.pieces.cap import PATIENCE, Cap
from hf_accum_fix.pieces.cut import in_pieces
from tests.numerics.heads import HEADS
from tests.numerics.parity import cut, reference_step, trainer_of
from tests.pieces.memory import Memory
from tests.pieces.test_in_pieces import SHORT, is_exact, split


@pytest.mark.parametrize("kind", SHORT)
def test_one_head_of_everyday(kind: str, tmp_path: Path) -> None:
    head, short = HEADS["llama"], Memory(**SHORT[kind])
    step = split(head, short, (4, 2), tmp_path)
    assert step.error(reference_step(head, cut(head.samples, 4))) <= head.tolerance
    assert short.failures and not short.left and is_exact(step)


@pytest.mark.parametrize("option", ({"out_of_memory": "split"}, {"micro_batch": "auto"}), ids=str)
def test_an_engine_whose_ranks_wait_is_refused(
    option: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [(name, value)] = option.items()
    with hf_accum_fix.apply(quiet=True, **option):
        trainer = trainer_of(HEADS["llama"], tmp_path)
        monkeypatch.setattr(trainer.accelerator.state, "distributed_type", DistributedType.FSDP)
        with pytest.raises(UnsupportedSetupError, match=f"got {name}='{value}' and FSDP, whose ranks wait"):
            trainer.train()
    assert trainer.state.global_step == 0


def test_one_head_in_as_few_micro_batches_as_fit(tmp_path: Path) -> None:
    head, short = HEADS["llama"], Memory()
    given = {"samples": [*head.samples, *head.samples[::-1]], "steps": 2, "learning_rate": 0.1}
    whole = split(head, Memory(), (1, 8), tmp_path, **given)
    found = split(head, short, (1, 8), tmp_path, options={"micro_batch": "auto"}, **given)
    assert found.error(whole) <= head.tolerance and is_exact(found)
    assert short.trained == [1] * 8 + [8]


def test_a_larger_piece_is_tried_again_below_what_failed() -> None:
    cap = Cap()
    cap.failed(800, 400)
    assert [cap.window_ended() for _ in range(PATIENCE)] == [*[False] * (PATIENCE - 1), True]
    assert cap.limit == 600
    cap.failed(600, 300)
    assert (cap.limit, cap.fails) == (300, 600)
    grown = [cap.window_ended() for _ in range(10 * PATIENCE)]
    assert sum(grown) < 5 and not grown[-1]
    assert 0.9 * cap.fails < cap.limit < cap.fails
    assert Cap.of(asdict(cap)) == cap


@pytest.mark.parametrize("count", (1, 5, 8, 12))
@pytest.mark.parametrize("group", (1, 2, 4))
@pytest.mark.parametrize("at_most", (1, 3, 4, 100))
def test_pieces_hold_each_place_once_and_groups_whole(count: int, group: int, at_most: int) -> None:
    pieces = in_pieces(range(count), group, at_most)
    assert [place for piece in pieces for place in piece] == [*range(count)]
    assert all(len(piece) <= max(at_most // group, 1) * group for piece in pieces)
    assert all(piece[0] % group == 0 for piece in pieces)


def test_auto_and_balancing_are_not_combined() -> None:
    with pytest.raises(OptionsError, match="expected one of them"):
        Options(micro_batch="auto", balance_windows=True)

"""The pictures: nothing is cut, labels do not run into one another, ticks are plain numbers, steps whole ones."""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tests.recipes import load


def matrix(path: Path) -> None:
    release_matrix = load("release_matrix", known_as="release_matrix")
    heads = ["llama", "gpt2-position-0", "bert-mlm, stream"]
    releases = [f"4.{k // 3}.{k % 3}" for k in range(60)] + ["5.23.0@accelerate==0.26.0@peft==0.13.2"]
    stock = {release: 0.5 if k % 5 else 1e-16 for k, release in enumerate(releases)}
    release_matrix.draw(
        {
            (release, ranks, head): release_matrix.Summary(stock[release], 1e-9, True, None, False)
            for release, ranks, head in itertools.product(releases, release_matrix.WORLD_SIZES, heads)
        },
        path,
    )


def speed(path: Path) -> None:
    rows = [
        {"mode": mode, "samples_per_cpu_second": 5.0 + turn, "losses": [8.3845, 8.374, 8.3837]}
        for mode in ("stock", "group_by_length", "balanced")
        for turn in range(3)
    ]
    load("window_speed").draw(rows, path)


def precision(path: Path) -> None:
    gradient_precision = load("gradient_precision")
    rises = {"bfloat16": 0.4, "float16": 0.004}
    rows = [
        {
            "head": head, "dtype": dtype, "accumulate_in": mode, "micro_batches": 4**k,
            "error": 0.004 * (1 + rises[dtype] * k**3),
        }
        for head in gradient_precision.HEADS
        for dtype in gradient_precision.DTYPES
        for mode in gradient_precision.MODES
        for k in range(6)
    ]  # fmt: skip
    gradient_precision.picture(rows, path)


def router(path: Path) -> None:
    router_loss = load("router_loss", known_as="router_loss")
    layers, experts = range(router_loss.LAYERS), router_loss.EXPERTS
    load_of = [[(1 + 0.3 * (-1) ** k) / experts for k in range(experts)] for _ in layers]
    by_domain = [[[1 / experts] * experts for _ in range(router_loss.DOMAINS)] for _ in layers]
    router_loss.pictures(
        [
            router_loss.Look(
                convention=convention, step=step, loss=3.8 / step, auxiliary=2 + 0.0001 * step,
                information=0.3 + 1 / step, load=load_of, by_domain=by_domain,
            )
            for convention in router_loss.CONVENTIONS
            for step in range(10, 160, 10)
        ],
        path,
    )  # fmt: skip


def loops(path: Path) -> None:
    rows = [
        {
            "mode": mode, "processes": 2, "per_device": 32 // steps, "accumulation": steps,
            "losses": [4.0 * steps / k for k in range(1, 34)],
        }
        for mode in ("accumulate", "count", "windows")
        for steps in (2, 8, 32)
    ]  # fmt: skip
    load("accelerate_loop").draw_curves(rows, argparse.Namespace(modes=["accumulate", "count", "windows"]), path)


def monitors(path: Path) -> None:
    rows = [
        {"step": 10 * k, "loss": 2 / k**2, "loss_standard_error": 0.1 / k**2, "sampled_loss": 2 / k**2.1}
        for k in range(1, 41)
    ]
    load("convergence_monitor").draw_curves(rows, path)


PICTURES: dict[str, Callable[[Path], None]] = {
    its.__name__: its for its in (matrix, speed, precision, router, loops, monitors)
}


@pytest.mark.parametrize("name", PICTURES)
def test_labels_are_plain_whole_and_apart(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **kwargs: drawn.append(figure))
    PICTURES[name](tmp_path / "x.png")
    assert drawn
    for figure in drawn:
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        inside = figure.get_window_extent()
        everything = figure.get_tightbbox(canvas.get_renderer())
        assert everything.x0 > -0.02 and everything.x1 * figure.dpi <= inside.x1 + 1, "cut at a side"
        assert everything.y0 > -0.02 and everything.y1 * figure.dpi <= inside.y1 + 1, "cut above or below"
        for axes in figure.axes:
            titles = [each for each in (axes.title, axes.xaxis.label, axes.yaxis.label) if each.get_text()]
            assert all(each.get_fontsize() >= 9 for each in titles), [each.get_text() for each in titles]
            for axis in (axes.xaxis, axes.yaxis):
                check(axis)


def check(axis: Any) -> None:
    low, high = sorted(axis.get_view_interval())
    shown = [
        tick.label1 for tick in axis.get_major_ticks()
        if tick.label1.get_visible() and tick.label1.get_text() and low <= tick.get_loc() <= high
    ]  # fmt: skip
    minor = [tick.label1.get_text() for tick in axis.get_minor_ticks() if tick.label1.get_visible()]
    texts = [label.get_text() for label in shown]
    assert not [text for text in texts + minor if "^" in text or "times" in text], "powers of ten"
    assert axis.get_offset_text().get_text() == "", "a factor at the end of the axis"
    if "step" in axis.get_label_text():
        assert all(float(text.replace(",", "")).is_integer() for text in texts), texts
    boxes = sorted((label.get_window_extent() for label in shown), key=lambda box: (box.x0, -box.y0))
    assert not [1 for one, other in itertools.pairwise(boxes) if one.shrunk(0.9, 0.8).overlaps(other.shrunk(0.9, 0.8))]
    assert all(label.get_fontsize() >= 9 for label in shown) and math.isfinite(low)

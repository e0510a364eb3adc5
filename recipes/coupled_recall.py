"""What in-batch negatives lose to accumulation: a dual encoder that finds a function's docstring by its signature.

    OMP_NUM_THREADS=1 python recipes/coupled_recall.py                # some 4 minutes on a core
    python recipes/coupled_recall.py --steps 20 --batch 64            # a look

The pairs are the functions of Python's own library: signature and first line of the docstring, as hashed trigrams. Two
encoders are trained by InfoNCE on the same global batches, in the same order, from the same weights:

    G = 1                 the whole batch at once, by the stock Trainer
    stock, G = 8, 32      by accumulation: each sample meets the negatives of its micro-batch
    exact, G = 8, 32      hf_accum_fix.apply(coupled_loss="exact")

Recall at 1 is the share of held-out signatures whose own docstring is the nearest. The curves of "exact" lie on that of
G = 1; the table has the largest difference of their recall, and that of their parameters, relative.

The output folder gets results.jsonl (a line per evaluation), table.md and coupled_recall.png. Exit code 2: bad input.
"""

from __future__ import annotations

import ast
import random
import sys
import sysconfig
import tempfile
import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shared
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import Trainer, TrainerCallback

import hf_accum_fix

BUCKETS, WIDTH, HELD_OUT, EVERY = 4096, 64, 512, 10
#: (name, G, by apply): G = 1 first.
RUNS = (
    ("G = 1", 1, False),
    *(((f"{name}, G = {g}"), g, name == "exact") for name in ("stock", "exact") for g in (8, 32)),
)


def functions() -> list[tuple[str, str]]:
    """Signature and first line of the docstring of each function of Python's library."""
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and len(text := (ast.get_docstring(node) or "").split("\n")[0]) > 20:
                found.append((f"{path.stem} {node.name} {' '.join(each.arg for each in node.args.args)}", text))
    return list(dict(reversed(found)).items())


def trigrams(text: str) -> list[int]:
    padded = f"  {text.lower()} "
    return [1 + zlib.crc32(padded[at : at + 3].encode()) % BUCKETS for at in range(len(padded) - 2)]


class Tower(nn.Module):
    """A mean of embedded trigrams, and two layers: one vector per text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.EmbeddingBag(1 + BUCKETS, WIDTH, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layers(self.embed(ids))  # type: ignore[no-any-return]


class DualEncoder(nn.Module):
    """InfoNCE both ways, with a learnt temperature, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.signature, self.docstring = Tower(), Tower()
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        one = F.normalize(self.signature(batch["signature"]), dim=-1)
        other = F.normalize(self.docstring(batch["docstring"]), dim=-1)
        return one @ other.T * self.logit_scale.exp()

    def forward(self, **batch: Tensor) -> dict[str, Tensor]:
        logits = self.logits(batch)
        right = torch.arange(len(logits), device=logits.device)
        return {"loss": (F.cross_entropy(logits, right) + F.cross_entropy(logits.T, right)) / 2}


def collate(rows: Sequence[tuple[list[int], list[int]]]) -> dict[str, Tensor]:
    sides = (("signature", [row[0] for row in rows]), ("docstring", [row[1] for row in rows]))
    return {name: pad_sequence([torch.tensor(each) for each in its], batch_first=True) for name, its in sides}


class InOrder(shared.InOrder, Trainer):
    """Every run has the same global batches."""


class Recall(TrainerCallback):
    """Recall at 1 on held-out pairs, every few steps."""

    def __init__(self, held_out: Mapping[str, Tensor]) -> None:
        self.held_out, self.found = held_out, list[tuple[int, float]]()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step % EVERY == 0:
            with torch.no_grad():
                nearest = model.logits(self.held_out).argmax(dim=1)
            self.found.append((state.global_step, float((nearest == torch.arange(len(nearest))).float().mean())))


def train(
    pairs: Sequence[Any], held_out: Mapping[str, Tensor], steps: int, batch: int, g: int, *, exact: bool
) -> tuple[list[tuple[int, float]], nn.Module, float]:
    """Recall by step, the model, and seconds."""
    model, recall, begun = DualEncoder(), Recall(held_out), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args = shared.arguments(
            folder, per_device_train_batch_size=batch // g, gradient_accumulation_steps=g, max_steps=steps,
            learning_rate=3e-3, lr_scheduler_type="constant", use_cpu=True,
        )  # fmt: skip
        trainer = InOrder(model=model, args=args, train_dataset=list(pairs), data_collator=collate, callbacks=[recall])
        if exact:
            with hf_accum_fix.apply(coupled_loss="exact", coupled=("signature", "docstring")):
                trainer.train()
        else:
            trainer.train()
    return recall.found, model, time.perf_counter() - begun


def off(model: nn.Module, reference: nn.Module) -> float:
    """Relative difference of the parameters."""
    one, other = (torch.cat([each.detach().flatten() for each in m.parameters()]) for m in (model, reference))
    return float((one - other).norm() / other.norm())


def draw(found: Mapping[str, list[tuple[int, float]]], path: Path) -> None:
    figure, ((panel,),) = shared.figure_of(1, 1, (7, 4))
    styles = {"G = 1": ("black", "-", 4.0), "stock": ("#c1440e", "--", 1.5), "exact": ("#3fa7d6", "-", 1.5)}
    for name, curve in found.items():
        color, line, width = styles[name.split(",")[0]]
        dots = {"marker": "o" if name.endswith("32") else None, "markersize": 3}
        panel.plot(*zip(*curve, strict=True), line, color=color, linewidth=width, label=name, **dots)
    shared.tidy(panel, steps=True, xlabel="optimizer step", ylabel="recall at 1, held-out pairs", ylim=(0, None))
    panel.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = shared.Parser(__doc__, "coupled_recall", new=True)
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps (default: 120)")
    parser.add_argument("--batch", type=int, default=256, help="pairs of a global batch, a multiple of 32")
    options = parser.parse_args()
    if options.steps < EVERY or options.batch < 64 or options.batch % 32:
        parser.error(f"got --steps {options.steps} --batch {options.batch}; expected {EVERY} steps, 64 pairs by 32s")
    pairs = [(trigrams(one), trigrams(other)) for one, other in functions()]
    random.Random(0).shuffle(pairs)
    held_out, rest = collate(pairs[:HELD_OUT]), pairs[HELD_OUT:]
    found, rows, reference = dict[str, list[tuple[int, float]]](), list[Sequence[object]](), None
    for name, g, exact in tqdm(RUNS, unit="run"):
        found[name], model, seconds = train(rest, held_out, options.steps, options.batch, g, exact=exact)
        reference = reference or model
        apart = max(abs(a - b) for (_, a), (_, b) in zip(found[name], found["G = 1"], strict=True))
        last = found[name][-1][1]
        rows.append((name, f"{last:.3f}", f"{apart:.3f}", f"{off(model, reference):.1e}", f"{seconds:.0f}"))
        for step, value in found[name]:
            shared.add_line(options.output / "results.jsonl", {"run": name, "step": step, "recall": value})
    table = shared.markdown(("run", "recall at 1", "largest difference to G = 1", "parameters off", "seconds"), rows)
    (options.output / "table.md").write_text(table)
    draw(found, options.output / "coupled_recall.png")
    sys.stdout.write(f"{len(pairs):,} pairs\n{table}")


if __name__ == "__main__":
    main()

"""What router_loss="exact" costs: one small Mixtral trained under each convention, in turns.

    OMP_NUM_THREADS=1 python recipes/router_loss_cost.py              # some 5 minutes on a core
    python recipes/router_loss_cost.py --rounds 0                     # no clocks: forwards and operations, in seconds

Three runs make a round: mean, mean again, exact; each round begins with another of them. The figures are the
least processor time and the median time of an optimizer step in each run, and their ratios to the first mean run of the
round. "mean again" is the noise: a ratio means something only where it lies outside it. The first three steps, in
which the loss is observed, are left out. Forwards and operations of a step are counted, not timed.

The output folder gets results.jsonl (a line per run) and table.md. Exit code 2: bad input.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

import shared
import torch
from overhead import VOCABULARY, Counting, Size, run, spread
from tqdm import tqdm
from transformers import MixtralConfig, MixtralForCausalLM

import hf_accum_fix

MODES = ("mean", "mean again", "exact")
SIZE = Size(width=256, layers=4, length=192, steps=6)
#: Windows in which the loss is observed, and which are left out.
LOOKED_AT = 3


def build() -> MixtralForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": SIZE.width, "intermediate_size": 2 * SIZE.width, "num_hidden_layers": SIZE.layers}
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.01}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": SIZE.length}
    return MixtralForCausalLM(
        MixtralConfig(vocab_size=VOCABULARY, output_router_logits=True, **shape, **experts, **heads)
    )


def train(mode: str, steps: int, after: Callable[[int], None]) -> int:
    """Train under a convention; return the number of forwards."""
    with hf_accum_fix.apply(router_loss=mode.split(" ")[0]):
        return run(build(), "llama", SIZE, steps, after)


def count(mode: str) -> dict[str, float]:
    """Forwards and operations of one step, after the first windows."""
    counting, forwards = Counting(), {}
    for steps in (LOOKED_AT, LOOKED_AT + 1):
        with ExitStack() as stack:

            def after(step: int, stack: ExitStack = stack, steps: int = steps) -> None:
                if steps > LOOKED_AT and step == LOOKED_AT:
                    stack.enter_context(counting)
                elif step > LOOKED_AT:
                    stack.close()

            forwards[steps] = train(mode, steps, after)
    return {"forwards": forwards[LOOKED_AT + 1] - forwards[LOOKED_AT], "operations": counting.operations}


def measure(mode: str) -> dict[str, float]:
    """One optimizer step [s]: its median by the wall, and the least of this thread's processor time."""
    marks: list[tuple[float, float]] = []

    def after(_: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), time.thread_time()))

    train(mode, SIZE.steps, after)
    steps = [(late[0] - early[0], late[1] - early[1]) for early, late in itertools.pairwise(marks[LOOKED_AT - 1 :])]
    return {
        "wall": statistics.median(wall for wall, _ in steps),
        "processor": min(processor for _, processor in steps),
    }


def table(counted: dict[str, dict[str, float]], rounds: list[dict[str, dict[str, float]]]) -> str:
    """Markdown, one row a convention: medians and quartiles of the rounds' ratios."""
    head = ["router_loss", "forwards a step", "operations a step"]
    head += ["processor time of a step", "wall time of a step"] if rounds else []
    lines = []
    for mode in MODES:
        found = counted[mode.split(" ")[0]]
        more = found["operations"] / counted["mean"]["operations"]
        row = [mode, f"{found['forwards']:g}", f"{found['operations']:g} ({more:.3f}x)"]
        for clock in ("processor", "wall") if rounds else ():
            row.append(spread([each[mode][clock] / each["mean"][clock] for each in rounds]).words(".3f"))
        lines.append(row)
    return shared.markdown(head, lines)


def main() -> None:
    parser = shared.Parser(__doc__, "router_loss_cost", new=True)
    parser.add_argument("--rounds", type=int, default=8, help="rounds of three runs (default: 8); 0: count only")
    options = parser.parse_args()
    counted = {mode: count(mode) for mode in MODES if mode != "mean again"}
    lines, rounds = options.output / "results.jsonl", []
    for mode, found in counted.items():
        shared.add_line(lines, {"mode": mode, **found})
    for turn in tqdm(range(options.rounds), disable=not options.rounds, unit="round"):
        rounds.append({mode: measure(mode) for mode in MODES[turn % 3 :] + MODES[: turn % 3]})
        for mode, found in rounds[-1].items():
            shared.add_line(lines, {"mode": mode, "round": turn, **found})
    text = table(counted, rounds)
    (options.output / "table.md").write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()

"""One training on three machines, short of memory and killed twice: its losses are those of one machine.

    python recipes/any_machine.py              # 2 minutes on two cores

A small Llama learns the Python reference, 48 paragraphs a step, in float32. "undisturbed" is one process. The other run
begins on four ranks; one is killed after a third of the steps, and two ranks go on with the last checkpoint, then one.
A micro-batch of more numbers (rows x width) than fit runs out of memory late in its backward, of twice as many in its
forward: a stand-in. The output folder gets any_machine.png, a log a machine, and the checkpoints, with the losses.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import shared
import torch
import transformers
from accelerate_loop import build_model, collate, read_samples
from tqdm import tqdm

import hf_accum_fix

FULL, RUNS = "planted: out of memory", ("undisturbed", "run")


class Machine(NamedTuple):
    """Ranks, samples of a micro-batch, micro-batches; the numbers that fit; the third of the steps it ends after."""

    ranks: int
    per_device: int
    accumulation: int
    memory: int = 10**9
    until: int = 3

    def __str__(self) -> str:
        return f"{self.ranks} x {self.per_device} x {self.accumulation}"


MACHINES = {
    "undisturbed": Machine(1, 8, 6),
    "four ranks": Machine(4, 12, 1, 1800, 1),
    "two ranks": Machine(2, 24, 1, 1000, 2),
    "one rank": Machine(1, 1, 48, 500),
}


def train(name: str, machine: Machine, options: argparse.Namespace) -> None:
    """A machine's part of the training, on this rank: from the last checkpoint there is, until it is killed."""
    micro_batch = "auto" if name == "one rank" else "fixed"
    hf_accum_fix.apply(drop_duplicates=True, out_of_memory="split", micro_batch=micro_batch)
    shape = argparse.Namespace(head="llama", total_batch=48, windows=options.steps // 2)
    model, last = build_model(shape), options.steps * machine.until // 3

    def check(ids: torch.Tensor, memory: int) -> None:
        if ids.numel() > memory:
            print(FULL, tuple(ids.shape), flush=True)
            raise torch.cuda.OutOfMemoryError(FULL)

    def embedded(_: Any, args: Any, output: torch.Tensor) -> None:
        check(args[0], 2 * machine.memory)
        if output.requires_grad:
            output.register_hook(lambda _: check(args[0], machine.memory))  # gradients reach it last

    model.get_input_embeddings().register_forward_hook(embedded)

    class Kill(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == last + 1 and args.process_index == args.world_size - 1:
                os.kill(os.getpid(), signal.SIGKILL)

    given = {"per_device_train_batch_size": machine.per_device, "gradient_accumulation_steps": machine.accumulation}
    given |= {"max_steps": options.steps, "learning_rate": 3e-3, "warmup_steps": 3, "ddp_backend": "gloo"}
    given |= {"logging_strategy": "steps", "logging_steps": 1, "save_strategy": "steps", "save_steps": 2}
    folder = options.output / RUNS[name != "undisturbed"]
    arguments = shared.arguments(folder, **given)
    trainer = transformers.Trainer(model, arguments, collate, read_samples(shape), callbacks=[Kill()])
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*")))
    shared.end_ranks()


def show(options: argparse.Namespace) -> None:
    """The table, and the picture: losses, and how far each is from the undisturbed one."""
    states = [options.output / run / f"checkpoint-{options.steps}" / "trainer_state.json" for run in RUNS]
    right, found = ([row["loss"] for row in json.loads(state.read_text())["log_history"]] for state in states)
    figure, [[above], [below]] = shared.figure_of(2, 1, (7, 5.5), sharex=True)
    above.plot(range(1, options.steps + 1), right, label=f"{RUNS[0]}: {MACHINES[RUNS[0]]}", linewidth=7, alpha=0.3)
    lines, begin = [], 0
    for name, machine in [*MACHINES.items()][1:]:
        steps = range(begin, begin := options.steps * machine.until // 3)
        apart = [abs(found[step] / right[step] - 1) for step in steps]
        failures = (options.output / f"{name}.log").read_text().count(FULL)
        lines.append([name, machine, f"{steps[0] + 1} to {begin}", failures, f"{max(apart):.1e}"])
        [line] = above.plot([step + 1 for step in steps], found[steps[0] : begin], label=f"{name}: {machine}")
        below.plot([step + 1 for step in steps], apart, ".", color=line.get_color())
    shared.tidy(above, ylabel="logged loss")
    shared.tidy(below, steps=True, xlabel="optimizer step", ylabel="off by, relative")
    above.legend(title="ranks x samples x micro-batches", frameon=False)
    figure.savefig(options.output / "any_machine.png", dpi=150)
    print(shared.markdown(["machine", "ranks x samples x G", "steps", "out of memory", "losses off by"], lines))


def main() -> None:
    parser = shared.Parser(__doc__, "any_machine", new="--machine" not in sys.argv)
    parser.add_argument("--steps", type=shared.positive, default=60, help="a multiple of 6 (default: 60)")
    parser.add_argument("--machine", choices=MACHINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps % 6:
        parser.error(f"got --steps {options.steps}; expected a multiple of 6; give 6 or 60")
    if options.machine:
        return train(options.machine, MACHINES[options.machine], options)
    options.output.mkdir(parents=True, exist_ok=True)
    for name, machine in tqdm(MACHINES.items(), unit="machine"):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={machine.ranks}"]
        command += [__file__, "--machine", name, "--steps", str(options.steps), "--output", str(options.output)]
        with (options.output / f"{name}.log").open("w") as log:
            code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
        if ("(SIGKILL)" in Path(log.name).read_text()) != (machine.until < 3) or (code and machine.until == 3):
            raise SystemExit(f"{name}: got exit code {code}; read {log.name}")
    return show(options)


if __name__ == "__main__":
    main()

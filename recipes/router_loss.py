"""What a router loss balances: one small mixture of experts, several domains, three conventions.

    python recipes/router_loss.py                                     # some 10 minutes on a core
    accelerate launch --num_processes 2 recipes/router_loss.py        # the same on several ranks

A Mixtral is trained from one start on the same samples in the same order, in micro-batches of two: by the stock Trainer
(which adds the router loss of every micro-batch undivided), and with apply(router_loss=...) as "mean" and "exact".
Every few steps it is run on a held-out batch of all domains at once: the loss of its tokens, its
load-balancing loss over that whole batch, and how much a token's expert reveals about its domain (mutual information
[bits], mean over layers). A loss that balances inside every micro-batch asks each pair of samples to fill
all experts; one that balances over the global batch lets a domain have its own.

The output folder gets results.jsonl (a line per look at the held-out batch), table.md, and router_loss.png: the three
curves, and the load of every expert by domain at the end. Exit code 2: bad input.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import shared
import torch
from torch import Tensor
from tqdm import tqdm
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback

import hf_accum_fix

CONVENTIONS = ("stock", "mean", "exact")
DOMAINS, WORDS, EXPERTS, TOP_K, LAYERS = 4, 24, 8, 2, 3
VOCABULARY = 4 + DOMAINS * WORDS
LENGTHS = (12, 48)


# ---- 1. The samples ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Tokens of one domain."""

    ids: Tensor
    domain: int


def draw(count: int, seed: int) -> list[Sample]:
    """Texts of a few domains: each has its own words, and borrows a third of its neighbour's.

    Three words can follow a word, which ones depends on the domain.
    """
    rules = torch.Generator().manual_seed(0)
    follow = torch.randint(0, WORDS + WORDS // 3, (DOMAINS, WORDS + WORDS // 3, 3), generator=rules)
    g = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        domain = int(torch.randint(DOMAINS, (), generator=g))
        length = int(torch.randint(*LENGTHS, (), generator=g))
        word, words = int(torch.randint(WORDS, (), generator=g)), []
        for _ in range(length):
            words.append(word)
            word = int(follow[domain, word, int(torch.randint(3, (), generator=g))])
        samples.append(Sample(4 + (domain * WORDS + torch.tensor(words)) % (DOMAINS * WORDS), domain))
    return samples


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([each.ids for each in samples], batch_first=True)
    mask = pad([torch.ones_like(each.ids) for each in samples], batch_first=True)
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def build() -> MixtralForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": LENGTHS[1]}
    experts = {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "router_aux_loss_coef": 0.1}
    return MixtralForCausalLM(MixtralConfig(output_router_logits=True, **shape, **heads, **experts))


# ---- 2. The held-out batch --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Look:
    """The model on the held-out batch."""

    convention: str
    step: int
    loss: float  # mean over its tokens [nats]
    auxiliary: float  # load-balancing loss over the whole batch; top_k is perfect balance
    information: float  # between the expert and the domain of a token [bits], mean over layers
    load: list[list[float]]  # share of each expert's tokens [layer][expert]; 1/E is perfect balance
    by_domain: list[list[list[float]]]  # the same of each domain [layer][domain][expert]


def look(model: Any, held_out: list[Sample], convention: str, step: int) -> Look:
    batch = collate(held_out)
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    with torch.no_grad():
        outputs = model(**{key: value.to(device) for key, value in batch.items()})
    model.train(training)
    auxiliary = float(outputs.aux_loss)
    tokens = batch["attention_mask"].bool()
    domains = torch.tensor([each.domain for each in held_out])[:, None].expand_as(tokens)[tokens]
    by_domain = []
    for gate in outputs.router_logits:
        chosen = gate.cpu()[tokens.flatten()].topk(TOP_K, dim=-1).indices
        counts = torch.zeros(DOMAINS, EXPERTS).index_add_(
            0, domains, torch.nn.functional.one_hot(chosen, EXPERTS).sum(dim=1).float()
        )
        by_domain.append(counts)
    joint = torch.stack(by_domain) / torch.stack(by_domain).sum(dim=(1, 2), keepdim=True)
    independent = joint.sum(dim=1, keepdim=True) * joint.sum(dim=2, keepdim=True)
    information = torch.where(joint > 0, joint * (joint / independent).log2(), 0.0).sum(dim=(1, 2)).mean()
    shares = joint / joint.sum(dim=2, keepdim=True)
    loss = float(outputs.loss) - model.router_aux_loss_coef * auxiliary
    return Look(convention, step, loss, auxiliary, float(information), joint.sum(dim=1).tolist(), shares.tolist())


class Looking(TrainerCallback):
    """Run the held-out batch every few steps."""

    def __init__(self, convention: str, held_out: list[Sample], every: int, bar: Any) -> None:
        self.convention, self.held_out, self.every, self.bar = convention, held_out, every, bar
        self.looks: list[Look] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.bar.update()
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.looks.append(look(model, self.held_out, self.convention, state.global_step))
            self.bar.set_postfix_str(f"{self.convention}: loss {self.looks[-1].loss:.3f}")


def train(convention: str, options: argparse.Namespace, bar: Any) -> list[Look]:
    looking = Looking(convention, draw(96, seed=1), options.every, bar)
    option = contextlib.nullcontext() if convention == "stock" else hf_accum_fix.apply(router_loss=convention)
    with option, tempfile.TemporaryDirectory() as output:
        arguments = shared.arguments(
            output, per_device_train_batch_size=2, gradient_accumulation_steps=options.accumulate,
            max_steps=options.steps, learning_rate=3e-3, lr_scheduler_type="constant", seed=0,
        )  # fmt: skip
        data = draw(options.samples, seed=2)
        trainer = Trainer(build(), arguments, collate, data, callbacks=[looking])
        trainer.train()
    return looking.looks


# ---- 3. The figures ---------------------------------------------------------------------------------------


def table(looks: list[Look]) -> str:
    """Markdown: the last look of each convention."""
    head = ("router_loss", "token loss", "load-balancing loss", "expert reveals domain [bits]", "least and most load")
    lines = []
    for convention in CONVENTIONS:
        last = [each for each in looks if each.convention == convention][-1]
        load = [share * EXPERTS for layer in last.load for share in layer]
        numbers = (f"{last.loss:.4f}", f"{last.auxiliary:.4f}", f"{last.information:.3f}")
        lines.append((convention, *numbers, f"{min(load):.2f}x, {max(load):.2f}x"))
    return shared.markdown(head, lines)


def pictures(looks: list[Look], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    curves, global_load, domains = figure.subfigures(3, 1, height_ratios=(1.2, 0.9, 1.2))
    for panel, name, title in zip(
        curves.subplots(1, 3),
        ("loss", "auxiliary", "information"),
        ("token loss, held out [nats]", "load-balancing loss of the whole batch", "expert reveals domain [bits]"),
        strict=True,
    ):
        for convention in CONVENTIONS:
            own = [each for each in looks if each.convention == convention]
            panel.plot([each.step for each in own], [getattr(each, name) for each in own], label=convention)
        panel.set_title(title, fontsize=10)
        shared.tidy(panel, steps=True, xlabel="optimizer step")
    curves.axes[0].legend(frameon=False)
    last = {each.convention: each for each in looks}
    bars = global_load.subplots(1, len(CONVENTIONS), sharey=True)
    for panel, convention in zip(bars, CONVENTIONS, strict=True):
        load = torch.tensor(last[convention].load) * EXPERTS
        for layer in range(LAYERS):
            places = [expert + (layer - 1) * 0.27 for expert in range(EXPERTS)]
            panel.bar(places, load[layer].tolist(), width=0.25)
        panel.axhline(1, color="grey", linewidth=0.8)
        panel.set_title(f"{convention}: load, by layer", fontsize=10)
        shared.tidy(panel, xlabel="expert", xticks=range(EXPERTS))
    bars[0].set_ylabel("times its share")
    panels = domains.subplots(1, len(CONVENTIONS), sharey=True)
    for panel, convention in zip(panels, CONVENTIONS, strict=True):
        image = [[share * EXPERTS for share in row] for row in last[convention].by_domain[-1]]
        drawn = panel.imshow(image, vmin=0, vmax=EXPERTS / TOP_K, aspect="auto", cmap="viridis")
        panel.set_title(f"{convention}: last layer, by domain", fontsize=10)
        panel.set_xlabel("expert")
        panel.set_xticks(range(EXPERTS))
    panels[0].set_yticks(range(DOMAINS))
    panels[0].set_ylabel("domain")
    domains.colorbar(drawn, ax=list(panels), label="times its share", shrink=0.9)
    figure.savefig(path, dpi=150)


# ---- 4. The run -------------------------------------------------------------------------------------------


def main() -> None:
    parser = shared.Parser(__doc__, "router_loss", new=True)
    parser.add_argument("--steps", type=shared.positive, default=150, help="optimizer steps (default: 150)")
    parser.add_argument("--accumulate", type=shared.positive, default=8, help="micro-batches of a window (default: 8)")
    parser.add_argument("--every", type=shared.positive, default=10, help="steps between looks (default: 10)")
    parser.add_argument("--samples", type=shared.positive, default=2048, help="of the training set (default: 2048)")
    options = parser.parse_args()
    looks: list[Look] = []
    with tqdm(total=options.steps * len(CONVENTIONS), unit="step") as bar:
        for convention in CONVENTIONS:
            looks += train(convention, options, bar)
    if shared.first_rank():
        for each in looks:
            shared.add_line(options.output / "results.jsonl", asdict(each))
        (options.output / "table.md").write_text(table(looks))
        pictures(looks, options.output / "router_loss.png")
        sys.stdout.write(table(looks))


if __name__ == "__main__":
    main()

"""A process of its own whose memory is short: python -m tests.pieces.full_machine DEVICE MIB, which prints JSON."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import hf_accum_fix

WORDS, LONGEST, GLOBAL_BATCH = 8192, 128, 64


def train(folder: str, device: str, rows: int, **options: Any) -> dict[str, Any]:
    """Two steps of a Llama whose logits are most of its memory: how it moved, the losses; "error": what ended it."""
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, pad_token_id=0, **shape))
    drawn = torch.Generator().manual_seed(1)
    lengths = torch.randint(64, LONGEST + 1, (2 * GLOBAL_BATCH,), generator=drawn).tolist()
    samples = [torch.randint(1, WORDS, (length,), generator=drawn) for length in lengths]

    def collate(texts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        ids = pad_sequence(texts, True)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": ids.masked_fill(ids == 0, -100)}

    before = torch.cat([each.detach().flatten().double() for each in model.parameters()])
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=rows, gradient_accumulation_steps=GLOBAL_BATCH // rows, max_steps=2,
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", logging_steps=1, save_strategy="no",
        report_to="none", disable_tqdm=True, use_cpu=device == "cpu", remove_unused_columns=False,
        dataloader_pin_memory=False, max_grad_norm=1e30,
    )  # fmt: skip
    trainer = Trainer(model, arguments, collate, samples)
    try:
        with hf_accum_fix.apply(quiet=True, **options):
            trainer.train()
    except (RuntimeError, MemoryError) as error:
        return {"error": repr(error)}
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "change": torch.cat([each.detach().flatten().double().cpu() for each in model.parameters()]) - before,
        "cap": trainer.state.stateful_callbacks.get("hf_accum_fix.out_of_memory", {}).get("attributes"),
    }


def limit(device: str, mib: int) -> None:
    """No more than this from now on."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(mib * 2**20 / torch.cuda.get_device_properties(0).total_memory)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(
            resource.RLIMIT_AS,
            (pages * resource.getpagesize() + mib * 2**20, resource.getrlimit(resource.RLIMIT_AS)[1]),
        )


if __name__ == "__main__":
    device, mib = sys.argv[1:]
    with TemporaryDirectory() as folder:
        fits = train(folder, device, 4)
        limit(device, int(mib))
        whole = train(folder, device, GLOBAL_BATCH)
        split = train(folder, device, GLOBAL_BATCH, out_of_memory="split")
        auto = train(folder, device, 1, micro_batch="auto")
    right = fits.pop("change")
    for each in (split, auto):
        each["off"] = float((each.pop("change") - right).norm() / right.norm())
    print(json.dumps({"fits": fits, "whole": whole, "split": split, "auto": auto}))

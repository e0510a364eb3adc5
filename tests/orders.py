"""What a script can do before the patch: each in a forked process, which then trains BERT's masked LM, or asks.

    orders.py HOW NAME [NAME,NAME] ...

A line of JSON: for each name the relative error of the gradient, or the exit code of ``verify`` or ``doctor``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from tempfile import mkdtemp
from typing import Any

#: As most scripts begin.
HF = "import transformers as hf; "
SIZES = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
FIRST = {
    "nothing": "",
    "transformers": "import transformers",
    "config": HF + "hf.BertConfig()",
    "model": HF + f"hf.BertModel(hf.BertConfig(**{SIZES}))",
    "arguments": HF + "hf.TrainingArguments('unused', use_cpu=True, report_to='none')",
    "tokenizer": HF
    + "import tokenizers as t; hf.PreTrainedTokenizerFast(tokenizer_object=t.Tokenizer(t.models.WordLevel({'a': 0})))",
    "Trainer": "from transformers import Trainer",
    "pipeline": "from transformers import pipeline",
    "peft": "import peft",
    "accelerate": "import accelerate; accelerate.Accelerator(cpu=True)",
    "trl": "from trl import SFTTrainer",
}


def error(cls: Callable[..., Any], end: Callable[[Any], Any] = lambda trainer: trainer.train()) -> Any:
    """Of one step of plain SGD on 4 x 2 samples, whose gradient is that of one batch; what ``end`` returns, if not."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    without_dropout = hf.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = hf.BertForMaskedLM(without_dropout)
    ids = torch.randint(16, (8, 8))
    labels = ids.masked_fill(torch.arange(8) > torch.arange(8)[:, None], -100)
    wanted = torch.autograd.grad(model(input_ids=ids, labels=labels).loss, [*model.parameters()])
    before = [each.detach().clone() for each in model.parameters()]
    arguments = hf.TrainingArguments(
        mkdtemp(), per_device_train_batch_size=2, gradient_accumulation_steps=4, max_steps=1, learning_rate=1.0,
        lr_scheduler_type="constant", optim="sgd", max_grad_norm=1e9, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    data = [{"input_ids": one, "labels": its} for one, its in zip(ids, labels, strict=True)]
    found = end(cls(model=model, args=arguments, train_dataset=data))
    if isinstance(found, int):
        return found
    off = [old - new.detach() - grad for old, new, grad in zip(before, model.parameters(), wanted, strict=True)]
    return float(torch.cat([each.flatten() for each in off]).norm() / torch.cat([*map(torch.flatten, wanted)]).norm())


def asked(how: str) -> Any:
    if how == "stock":
        from transformers import Trainer

        return error(Trainer)
    import hf_accum_fix

    if how == "apply":
        hf_accum_fix.apply(quiet=True)
        return asked("stock")
    if how == "class":
        return error(hf_accum_fix.GlobalBatchTrainer)
    if how == "verify":
        from transformers import Trainer

        return error(Trainer, lambda trainer: int(hf_accum_fix.verify(trainer).verdict.kind))
    from hf_accum_fix.cli import main

    return main([how])


def main(how: str, *orders: str) -> None:
    # What no order is about, once for all.
    import datasets
    import sklearn.metrics
    import torch._dynamo
    from torch.distributed import checkpoint

    assert all((datasets, sklearn, torch, checkpoint))
    assert "transformers" not in sys.modules
    found = {}
    for order in orders:
        reading, writing = os.pipe()
        if not os.fork():
            with redirect_stdout(sys.stderr):
                for name in order.split(","):
                    exec(FIRST[name], {})
                answer = asked(how)
            os.write(writing, json.dumps(answer).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as told:
            found[order] = told.read()
        os.wait()
    print(json.dumps({order: json.loads(answer) if answer else None for order, answer in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])

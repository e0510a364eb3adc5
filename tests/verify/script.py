"""A plain training script, as a user has it: verified by ``hf-accum-fix verify``; with "fixed" it calls apply()."""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

if "stops" in sys.argv:
    sys.exit("nothing to train")
if "fixed" in sys.argv:
    import hf_accum_fix

    hf_accum_fix.apply()
torch.manual_seed(0)
config = BertConfig(
    vocab_size=48, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_labels=2
)
samples = [{"input_ids": torch.randint(4, 48, (9,)), "labels": torch.tensor(i % 2)} for i in range(11)]
with tempfile.TemporaryDirectory() as output:
    arguments = TrainingArguments(
        output_dir=output,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        remove_unused_columns=False,
    )
    model = BertForSequenceClassification(config)
    Trainer(model=model, args=arguments, train_dataset=samples, eval_dataset=samples).train()
print("trained")

r"""One global batch, several splits: the LLaVA-1.5 loss table of LLaMA-Factory #7443, stock and corrected.

    python recipes/llava_sweep.py --steps 3 --total-batch 32 --splits 16x2,1x32     # a first answer, half a minute
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py                # 20 steps, 2 minutes on 2 cores
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py --steps 100    # the published length
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py --head bert    # a head wrong on 5.23.0
    accelerate launch --num_processes 4 recipes/llava_sweep.py                      # the same on 4 GPUs
    python recipes/llava_sweep.py --splits 16x8,1x128 --modes stock,apply           # one process

A split PxG is P samples per device and G micro-batches per optimizer step. The samples of a step are the same
for every split, so its loss and gradient should be too: the mean over the target tokens of the whole step.
Every split runs in every mode, from the same weights, over the same samples, with the same optimizer (AdamW):

    stock    the installed transformers.Trainer
    hotfix   LLaMA-Factory's: model_accepts_loss_kwargs = False, so that the Trainer divides by G
    apply    stock under hf_accum_fix.apply()
    trainer  hf_accum_fix.GlobalBatchTrainer
    balanced apply(balance_windows=True), if --modes names it: the same steps, with length-balanced micro-batches

The sweep shows two errors. transformers 4.49.0 adds up the means of the G micro-batches: loss and gradient come out
G times too large. Dividing by G leaves the mean of the micro-batch means, where a one-word answer alone in its
micro-batch counts as much as a long one: a rest that depends on the per-device batch (published: 138/32 = 4.31
with one sample, 6.4/2 = 3.20 with sixteen).

For the rest to show, the loss of a token must depend on the length of its answer, as it does where training
starts from a language model that has read text. A random model pays ln V for every token. So the small model
first reads the long answers as plain text, without pictures, for WARM_UP_STEPS steps, chosen so that the rest is
about as large as the published one: sentences become cheap, one-word answers stay dear. These weights are made
once, kept as `initial_model` in the output folder, and every cell starts from them.

The pictures are scikit-learn's digits, and the conversations are written from their pixels; the model is a small
LlavaForConditionalGeneration, built here. The output folder gets results.jsonl (a line per cell: loss and gradient
norm of every step, not rounded), environment.json and curves.png. Bad input: exit code 2.

Source: https://github.com/hiyouga/LLaMA-Factory/issues/7443 (the table), pull request 7448 (the hotfix).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import itertools
import json
import math
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

if TYPE_CHECKING:  # answer a wrong option at once: import nothing heavy before the options are read
    import torch
    from datasets import Dataset

MODES = ("stock", "hotfix", "apply", "trainer")
OFFERED = (*MODES, "balanced")
# (processes, per-device batch, accumulation): initial and step-100 loss
PUBLISHED = {
    (4, 16, 2): (6.4, 1.8),
    (4, 8, 4): (13.65, 3.6),
    (4, 1, 32): (138, 33.13),
    (8, 1, 16): (69, 16.5),
}
PUBLISHED_ON = "4.49.0"
PANELS = {  # titles of the picture's panels
    "stock": "the installed Trainer",
    "hotfix": "LLaMA-Factory's",
    "apply": "hf_accum_fix.apply()",
    "trainer": "GlobalBatchTrainer",
    "balanced": "apply(balance_windows=True)",
}
COLOURS = ("#56B4E9", "#E69F00", "#7A0177", "#009E73")  # distinct for the colour-blind, too
OTHER_PER_DEVICE = (16, 8, 1)  # where no published split fits
EXTRAS = ("datasets", "matplotlib", "peft", "PIL", "rich", "sklearn")  # import names of the extra "recipes"

WARM_UP_STEPS = 12
IMAGE_SIZE, PATCH_SIZE = 32, 8  # [pixels]; 4 x 4 patches, 16 image tokens
IGNORED = -100

# ---- 1. The options ---------------------------------------------------------------------------------------


class BadInputError(ValueError):
    """The command line or the data are invalid; the message has what was given and what is expected."""


class Parser(argparse.ArgumentParser):
    """Raise where argparse would print its usage on every rank."""

    def error(self, message: str) -> NoReturn:
        raise BadInputError(message)


class Split(NamedTuple):
    """One way to split the global batch."""

    per_device: int
    accumulation: int

    def __str__(self) -> str:
        return f"{self.per_device}x{self.accumulation}"


def read_options(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(description="Split one global batch in several ways; compare stock and corrected training.")
    add = parser.add_argument
    add("--steps", type=int, default=20, help="optimizer steps of a cell (published: 100)")
    add("--total-batch", type=int, default=128, help="samples of one optimizer step, over all processes")
    add("--modes", default=",".join(MODES), help=f"some of {','.join(OFFERED)}; default: the first four")
    add("--splits", help="such as 16x2,1x32; default: the published ones that fit the number of processes")
    add("--head", choices=("llava", "bert"), default="llava", help="bert reads digits as 64 words")
    add(
        "--dtype",
        choices=("float32", "float64", "bfloat16"),
        default="float32",
        help="bfloat16 is mixed precision: the weights stay float32",
    )
    add("--lr", type=float, default=1e-3, help="constant learning rate of AdamW")
    add("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    add("--output", type=Path, default=Path("results/llava_sweep"), help="folder for the results")
    options = parser.parse_args(argv)
    if missing := [name for name in EXTRAS if importlib.util.find_spec(name) is None]:
        raise BadInputError(
            f"got no {', '.join(missing)}; expected the packages of the extra 'recipes'; do "
            'pip install "hf-accum-fix[recipes]", or pip install ".[recipes]" in a clone'
        )
    options.world = processes_asked_for()
    for name in ("steps", "total_batch", "lr"):
        if not getattr(options, name) > 0:
            raise BadInputError(f"--{name.replace('_', '-')} is {getattr(options, name)}: give more than zero")
    options.modes = list(dict.fromkeys(options.modes.split(",")))
    for mode in options.modes:
        if mode not in OFFERED:
            raise BadInputError(f"unknown mode '{mode}': --modes takes some of {','.join(OFFERED)}")
    options.splits = choose_splits(options.splits, options.total_batch, options.world)
    return options


def processes_asked_for() -> int:
    """The number of processes of this run, this one included.

    `accelerate launch --cpu --num_processes N` starts one process that does not know N, so read N from the launcher's
    command line; `main` then starts the N processes.

    Source: https://github.com/huggingface/accelerate/issues/2741
    """
    if "WORLD_SIZE" in os.environ or os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        return int(os.environ.get("WORLD_SIZE", "1"))
    import psutil

    launcher = psutil.Process().parent()
    found = re.search(r"--num[_-]processes[ =](\d+)", " ".join(launcher.cmdline()) if launcher else "")
    if found is None and "MASTER_PORT" in os.environ:  # which accelerate sets for more than one process
        raise BadInputError(
            "accelerate launch --cpu reads its number of processes from a file: give it as "
            "--num_processes N, or start by torchrun --nproc_per_node N"
        )
    return int(found[1]) if found else 1


def choose_splits(text: str | None, total: int, world: int) -> list[Split]:
    """The splits requested, else the published ones of this world size, else sensible ones."""
    if total % world:
        raise BadInputError(f"--total-batch {total} does not divide by {world} processes: give a multiple")
    share = total // world
    if text is None:
        fits = [Split(p, g) for gpus, p, g in PUBLISHED if gpus == world and p * g == share]
        return fits or [Split(p, share // p) for p in OTHER_PER_DEVICE if share % p == 0]
    splits = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)x(\d+)", part)
        if found is None:
            raise BadInputError(f"--splits has '{part}': give PxG, such as 16x2, with commas between")
        splits.append(Split(int(found[1]), int(found[2])))
        if splits[-1].per_device * splits[-1].accumulation != share:
            raise BadInputError(
                f"split {part} does not make --total-batch {total} on {world} processes: give PxG with P x G = {share}"
            )
    return list(dict.fromkeys(splits))


def check_output(options: argparse.Namespace) -> None:
    """Refuse a folder that can't be written, and one with results of another run."""
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        probe = options.output / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInputError(f"the output folder {options.output} can't be written: {error.strerror}") from error
    if (options.output / "results.jsonl").exists():
        raise BadInputError(f"{options.output} holds results: give another --output")


# ---- 2. The conversations ---------------------------------------------------------------------------------


def write_digits(folder: Path) -> list[dict[str, Any]]:
    """Writes scikit-learn's 1797 digits as pictures: of each its path, and a question and its answer."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder.mkdir(exist_ok=True)
    digits, choose, conversations = load_digits(), random.Random(7443), []
    for index, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / f"{index:04}.png"
        if not path.exists():  # the first rank's are read by all
            picture = Image.fromarray((pixels * 255 / 16).astype("uint8"))
            picture.resize((IMAGE_SIZE, IMAGE_SIZE), Image.Resampling.BILINEAR).save(path)
        question, answer = converse(pixels, int(label), choose)
        conversations.append({"images": [str(path)], "turns": [[f"<image>\n{question}", answer]]})
    return conversations


def converse(pixels: Any, label: int, choose: random.Random) -> tuple[str, str]:
    """A question about a digit and its answer: one word for half of them, sentences for a third.

    Args:
        pixels: grey levels, 0 (ground) to 16 (ink), shape (8, 8).
        label: the digit.
        choose: draws the question and the wording.
    """
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    digit, rows, columns = words[label], pixels.sum(1), pixels.sum(0)
    parity = "odd" if label % 2 else "even"
    stroke = "faint" if pixels.mean() < 4.5 else "plain" if pixels.mean() < 5.3 else "heavy"
    half = "upper" if rows[:4].sum() > rows[4:].sum() else "lower"
    side = "left" if columns[:4].sum() > columns[4:].sum() else "right"
    high, wide = words[(rows > 8).sum()], words[(columns > 8).sum()]
    draw = choose.random()
    if draw < 0.5:
        question, answer = choose.choice(
            [
                ("Which digit is this ?", digit),
                ("Is the digit odd or even ?", parity),
                ("Which side holds more ink ?", side),
                ("Is the stroke faint , plain or heavy ?", stroke),
            ]
        )
        return f"{question} Answer with one word .", answer
    if draw < 0.65:
        return "What is in the picture ?", choose.choice([f"A handwritten {digit} .", f"The digit {digit} ."])
    sentences = [
        (
            f"The picture shows a handwritten {digit} in {stroke} strokes on a dark ground .",
            f"Somebody has written the digit {digit} with a {stroke} pen , bright on dark .",
        ),
        (
            f"It fills {wide} columns and {high} rows of the small field .",
            f"From side to side it takes {wide} columns , and from top to bottom {high} rows .",
        ),
        (
            f"Most of its ink lies in the {half} half and towards the {side} .",
            f"The {half} half holds more of the ink , and so does the {side} side .",
        ),
        (
            f"It is an {parity} number , and {words[label + 1]} would be the next one .",
            f"Counting on from this {parity} number one comes to {words[label + 1]} .",
        ),
    ]
    told = sentences[: choose.choice([2, 3, 4])]
    return "Describe the picture in detail .", " ".join(choose.choice(wordings) for wordings in told)


# ---- 3. The models ----------------------------------------------------------------------------------------


def build_llava(conversations: list[dict[str, Any]], folder: Path, seed: int) -> None:
    """Saves a small LLaVA and its processor as a checkpoint; its language model has read the long answers."""
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    prompts, answers = zip(*(turn for record in conversations for turn in record["turns"]), strict=True)
    words = pre_tokenizers.Whitespace()
    counts = Counter(
        word
        for text in ("USER: ASSISTANT:", *prompts, *answers)
        for word, _ in words.pre_tokenize_str(text.replace("<image>", " "))
    )
    special = ["<unk>", "<pad>", "<s>", "</s>", "<image>"]
    vocabulary = special + [word for word, _ in counts.most_common(32000 - len(special))]
    ids = {word: place for place, word in enumerate(vocabulary)}
    model_of_words = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    model_of_words.pre_tokenizer = words
    tokenizer = hf.PreTrainedTokenizerFast(
        tokenizer_object=model_of_words,
        unk_token="<unk>",
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<image>"],
    )
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = hf.LlavaProcessor(
        hf.CLIPImageProcessor(size=square, crop_size=square),
        tokenizer,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )

    torch.manual_seed(seed)
    tower = hf.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        projection_dim=32,
        image_size=IMAGE_SIZE,
        patch_size=PATCH_SIZE,
    )
    language = hf.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=2048,
        pad_token_id=1,
        bos_token_id=2,
        eos_token_id=3,
    )
    model = hf.LlavaForConditionalGeneration(
        hf.LlavaConfig(
            vision_config=tower,
            text_config=language,
            image_token_index=ids["<image>"],
            pad_token_id=1,
            image_seq_length=(IMAGE_SIZE // PATCH_SIZE) ** 2,
        )
    )

    mean = sum(map(len, answers)) / len(answers)
    long = [f"<s> {answer} </s>" for answer in answers if len(answer) >= mean]
    draw, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(WARM_UP_STEPS):
        texts = draw.choices(long, k=32)
        batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
        mask = batch["attention_mask"]
        labels = batch["input_ids"].masked_fill(mask == 0, IGNORED)
        model(input_ids=batch["input_ids"], attention_mask=mask, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)


def initial_model(options: argparse.Namespace, checkpoint: str) -> torch.nn.Module:
    """The weights that every cell starts from, without the tower's."""
    import torch
    import transformers as hf

    torch.manual_seed(options.seed)
    dtype = torch.float64 if options.dtype == "float64" else torch.float32
    if options.head == "bert":
        return hf.BertForSequenceClassification(
            hf.BertConfig(
                vocab_size=18,
                hidden_size=64,
                intermediate_size=128,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=65,
                num_labels=10,
                hidden_dropout_prob=0,
                attention_probs_dropout_prob=0,
            )
        ).to(dtype)
    model = hf.LlavaForConditionalGeneration.from_pretrained(checkpoint).to(dtype)
    for name, parameter in model.named_parameters():
        # the tower is frozen as in LLaVA-1.5; its last layer is never read and would keep DDP waiting besides
        parameter.requires_grad_("vision_tower" not in name)
    return model


# ---- 4. The samples ---------------------------------------------------------------------------------------


def sample_order(records: int, options: argparse.Namespace) -> list[int]:
    """Index of the record at every place of the run: epoch after epoch, each in its own order."""
    shuffle, order = random.Random(options.seed), []
    while len(order) < options.steps * options.total_batch:
        order += shuffle.sample(range(records), records)
    return order[: options.steps * options.total_batch]


def llava_samples(
    conversations: list[dict[str, Any]], options: argparse.Namespace, checkpoint: str
) -> tuple[Dataset, Collator]:
    """Tokenised conversations in the order of the run, and their collator."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoProcessor

    processor = AutoProcessor.from_pretrained(checkpoint)
    tokenizer = processor.tokenizer
    picture = processor.image_token * AutoConfig.from_pretrained(checkpoint).image_seq_length

    def encode(record: dict[str, Any]) -> dict[str, list[int]]:
        # Vicuna's turns; the targets are the answers and the end of sequence behind each
        input_ids = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        labels = [IGNORED] * len(input_ids)
        for prompt, answer in record["turns"]:
            text = f"USER: {prompt} ASSISTANT:".replace("<image>", picture)
            question = tokenizer(text, add_special_tokens=False)["input_ids"]
            reply = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            input_ids += question + reply
            labels += [IGNORED] * len(question) + reply
        return {"input_ids": input_ids, "labels": labels}

    order = sample_order(len(conversations), options)
    used = sorted(set(order))
    row = {index: place for place, index in enumerate(used)}
    dataset = Dataset.from_list([conversations[index] for index in used]).map(encode, remove_columns="turns")
    dataset = dataset.select([row[index] for index in order]).add_column("place", list(range(len(order))))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return dataset, Collator(pad, processor.image_processor)


def bert_samples(options: argparse.Namespace) -> tuple[Dataset, Collator]:
    """Digits as sentences: a [CLS] and 64 grey levels as words; the label is the digit."""
    from datasets import Dataset
    from sklearn.datasets import load_digits

    digits = load_digits()
    order = sample_order(len(digits.target), options)
    rows = [
        {"input_ids": [17, *map(int, digits.data[index])], "labels": int(digits.target[index]), "place": place}
        for place, index in enumerate(order)
    ]
    return Dataset.from_list(rows), Collator(0, None)


class Collator:
    """Make a micro-batch of samples, padded on the right, and remember which ones this rank got.

    Attributes:
        seen: places in the dataset, micro-batch by micro-batch.
        padded, real: tokens of all micro-batches, with padding and without.
    """

    def __init__(self, pad: int, image_processor: Any) -> None:
        self.pad, self.image_processor = pad, image_processor
        self.clear()

    def clear(self) -> None:
        self.seen: list[list[int]] = []
        self.padded = self.real = 0

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        import torch
        from PIL import Image
        from torch.nn.utils.rnn import pad_sequence

        self.seen.append([sample["place"] for sample in samples])
        ids = [torch.tensor(sample["input_ids"]) for sample in samples]
        labels = [torch.tensor(sample["labels"]) for sample in samples]
        of_tokens = labels[0].dim() == 1
        batch = {
            "input_ids": pad_sequence(ids, True, self.pad),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], True),
            "labels": pad_sequence(labels, True, IGNORED) if of_tokens else torch.stack(labels),
        }
        self.padded += batch["input_ids"].numel()
        self.real += sum(map(len, ids))
        if self.image_processor:
            pictures = [Image.open(path).convert("RGB") for sample in samples for path in sample["images"]]
            batch["pixel_values"] = self.image_processor(pictures, return_tensors="pt")["pixel_values"]
        return batch


def full_batch(model: torch.nn.Module, samples: list[dict[str, Any]], collate: Collator) -> dict[str, float]:
    """The reference, without a Trainer: the mean over the items of one global batch, and its gradient's norm.

        loss = sum of -log p over all target tokens / number of target tokens

    For classification the items are the samples. In the dtype of `model`, eight samples at a time.
    """
    import torch
    from torch.nn.functional import cross_entropy

    device = next(model.parameters()).device
    total, items = 0.0, 0
    for start in range(0, len(samples), 8):
        batch = {name: value.to(device) for name, value in collate(samples[start : start + 8]).items()}
        labels = batch.pop("labels")
        logits = model(**batch).logits
        if labels.dim() == 2:  # position t predicts token t + 1
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        loss.backward()
        total += loss.item()
        items += int((labels != IGNORED).sum())
    squares = [p.grad.double().square().sum() for p in model.parameters() if p.grad is not None]
    grad_norm = torch.stack(squares).sum().sqrt().item() / items
    return {"loss": total / items, "grad_norm": grad_norm, "items": items}


# ---- 5. A cell: one mode, one split -----------------------------------------------------------------------


class Recorder:
    """Mixin before a Trainer: take the samples in order, keep losses and gradient norms unrounded.

    The loss of a step is what the Trainer would log, before it rounds: what `training_step` returned, summed
    over the window and averaged over the ranks.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.window: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        from torch.utils.data import SequentialSampler

        return SequentialSampler(self.train_dataset)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        self.window.append(loss.detach().double())
        if len(self.window) == self.args.gradient_accumulation_steps:
            self.losses.append(self.accelerator.reduce(sum(self.window), reduction="mean").item())
            self.window.clear()
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "grad_norm" in logs:
            self.grad_norms.append(float(logs["grad_norm"]))
        super().log(logs, *args, **kwargs)


def run_cell(
    mode: str,
    split: Split,
    options: argparse.Namespace,
    checkpoint: str,
    dataset: Dataset,
    collate: Collator,
) -> dict[str, Any]:
    """Trains one cell from the initial weights and returns its line of results.jsonl."""
    import transformers as hf
    from accelerate.state import AcceleratorState, GradientState

    import hf_accum_fix

    # accelerate keeps these for the whole process; the process group below stays
    AcceleratorState._reset_state()
    GradientState._reset_state()
    hf.set_seed(options.seed)
    collate.clear()
    started = time.perf_counter()
    arguments = hf.TrainingArguments(  # new ones for every cell: one release writes into those it is given
        output_dir=str(options.output),
        per_device_train_batch_size=split.per_device,
        gradient_accumulation_steps=split.accumulation,
        max_steps=options.steps,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        optim="adamw_torch",
        bf16=options.dtype == "bfloat16",
        seed=options.seed,
        max_grad_norm=1e9,  # the norm is measured, nothing is clipped: clipping would hide a factor
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        use_cpu=on_cpu(),
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        ddp_find_unused_parameters=False,
    )
    base = hf_accum_fix.GlobalBatchTrainer if mode == "trainer" else hf.Trainer
    patched = mode in ("apply", "balanced")
    with hf_accum_fix.apply(balance_windows=mode == "balanced") if patched else contextlib.nullcontext():
        trainer = type("Cell", (Recorder, base), {})(
            model=initial_model(options, checkpoint),
            args=arguments,
            train_dataset=dataset,
            data_collator=collate,
        )
        trainer.remove_callback(hf.PrinterCallback)
        if mode == "hotfix":
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    check_samples(collate.seen, split.accumulation, options)
    return {
        "mode": mode,
        "processes": options.world,
        **split._asdict(),
        "seconds": round(time.perf_counter() - started, 1),
        "padded_over_real": collate.padded / collate.real,
        "losses": trainer.losses,
        "grad_norms": trainer.grad_norms,
    }


def check_samples(seen: list[list[int]], accumulation: int, options: argparse.Namespace) -> None:
    """Check that every optimizer step had the same samples as under any other split.

    Args:
        seen: this rank's places in the dataset, in order, micro-batch by micro-batch.
        accumulation: micro-batches of a step.
        options: the run.
    """
    from torch.distributed import all_gather_object

    ranks = [seen] * options.world
    if options.world > 1:
        all_gather_object(ranks, seen)
    for step in range(options.steps):
        window = slice(step * accumulation, (step + 1) * accumulation)
        found = sorted(place for rank in ranks for batch in rank[window] for place in batch)
        if found != list(range(step * options.total_batch, (step + 1) * options.total_batch)):
            raise RuntimeError(f"step {step + 1} did not have its own {options.total_batch} samples")


def on_cpu() -> bool:
    import torch

    return os.environ.get("ACCELERATE_USE_CPU", "false").lower() == "true" or not torch.cuda.is_available()


# ---- 6. The results ---------------------------------------------------------------------------------------


def show_table(rows: list[dict[str, Any]], reference: dict[str, float], options: argparse.Namespace) -> None:
    """Prints the published table again, with loss and gradient norm as multiples of the full batch's."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 80, highlight=False)
    title = f"{describe(options)}\nfull batch at step 1: loss {reference['loss']:.4f}, gradient norm "
    table = Table(title=f"{title}{reference['grad_norm']:.4f}, {reference['items']} items", box=box.SIMPLE)
    for heading in (
        "mode",
        "split",
        "loss at\nstep 1",
        "times the\nfull batch's",
        "gradient norm,\ntimes full batch's",
        f"loss at\nstep {options.steps}",
    ):
        table.add_column(heading, justify="right")
    comparable = options.head == "llava" and options.total_batch == 128 and "stock" in by_mode(rows)
    if comparable and importlib.metadata.version("transformers") == PUBLISHED_ON:
        for split in dict.fromkeys(map(split_of, rows)):
            for initial, last in filter(None, [PUBLISHED.get((options.world, *split))]):
                table.add_row("published", str(split), f"{initial:g}", "", "", f"{last:g}" * (options.steps == 100))
                table.caption = "published: LLaMA-Factory's issue 7443, 100 steps"
    for mode, of_mode in by_mode(rows).items():
        table.add_section()
        for row in of_mode:
            table.add_row(
                mode,
                str(split_of(row)),
                f"{row['losses'][0]:.4f}",
                f"{row['losses'][0] / reference['loss']:.6f}",
                f"{row['grad_norms'][0] / reference['grad_norm']:.6f}",
                f"{row['losses'][-1]:.4f}",
            )
    console.print(table)
    verdicts = Table.grid(padding=(0, 1))
    tolerance = 1e-2 if options.dtype == "bfloat16" else 1e-5
    for mode, of_mode in by_mode(rows).items():
        loss = compare("loss", of_mode, [row["losses"][0] / reference["loss"] for row in of_mode], tolerance)
        norms = [row["grad_norms"][0] / reference["grad_norm"] for row in of_mode]
        verdicts.add_row(f"{mode}:", f"{loss};")
        verdicts.add_row("", compare("gradient norm", of_mode, norms, tolerance) + ";" * ("right" in loss))
        if "right" in loss:
            last = [row["losses"][-1] for row in of_mode]
            verdicts.add_row("", f"step-{options.steps} losses of the splits within {max(last) / min(last) - 1:.0e}")
    console.print(verdicts)


def describe(options: argparse.Namespace) -> str:
    """The model, the release and the global batch of a run."""
    model = f"{'BERT' if options.head == 'bert' else 'LLaVA'}, built small"
    processes = f"{options.world} process{'es' * (options.world > 1)}"
    release = importlib.metadata.version("transformers")
    return f"{model}; transformers {release}; global batch {options.total_batch}, {processes}"


def split_of(row: dict[str, Any]) -> Split:
    return Split(row["per_device"], row["accumulation"])


def by_mode(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {mode: [row for row in rows if row["mode"] == mode] for mode in dict.fromkeys(r["mode"] for r in rows)}


def compare(name: str, rows: list[dict[str, Any]], ratios: list[float], tolerance: float) -> str:
    """Describe multiples of the full batch's value: right, or a factor and the rest after dividing by it."""
    factors = {
        "": [1.0 for row in rows],
        "G times": [row["accumulation"] for row in rows],
        "W times": [row["processes"] for row in rows],
        "G x W times": [row["accumulation"] * row["processes"] for row in rows],
        "1/G of": [1 / row["accumulation"] for row in rows],
    }
    rests = {word: [ratio / factor for ratio, factor in zip(ratios, factors[word], strict=True)] for word in factors}
    # the best factor is the one whose rests come nearest to 1
    word = min(rests, key=lambda word: max(abs(math.log(rest)) for rest in rests[word]))
    off, apart = max(abs(rest - 1) for rest in rests[word]), max(rests[word]) / min(rests[word]) - 1
    if off <= tolerance:
        return f"{name} {word} the full batch's" if word else f"{name} right, within {off:.0e} of the full batch's"
    rest = f"off by up to {off:.1%}, {apart:.1%} between splits"
    return f"{name} {word} the full batch's, and then {rest}" if word else f"{name} {rest}"


def draw_curves(
    rows: list[dict[str, Any]], reference: dict[str, float], options: argparse.Namespace, path: Path
) -> None:
    """Draws the loss over optimizer steps: one panel per mode, one line per split, one scale, one legend."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    modes = by_mode(rows)
    figure, panels = pyplot.subplots(
        1, len(modes), figsize=(max(2.9 * len(modes), 6) + 0.6, 4.4), sharey=True, squeeze=False, layout="constrained"
    )
    figure.suptitle(f"The same batches, several splits\n{describe(options)}", wrap=True)
    for panel, (mode, of_mode) in zip(panels[0], modes.items(), strict=True):
        for place, (row, colour) in enumerate(zip(of_mode, itertools.cycle(COLOURS))):
            # each line thinner than the one before, so that lines that coincide all show
            panel.plot(
                range(1, options.steps + 1),
                row["losses"],
                label=str(split_of(row)).replace("x", " x "),
                color=colour,
                linewidth=7.5 / 2**place,
                marker="o" if options.steps < 5 else "",
                markersize=14 / 1.6**place,
                solid_capstyle="round",
            )
        panel.axhline(reference["loss"], color="black", linewidth=1, linestyle=":", label="full batch at step 1")
        panel.set_title(f"{mode}\n{PANELS[mode]}", fontsize="medium")
        panel.set_xlabel("optimizer step")
        panel.xaxis.set_major_locator(ticker.MaxNLocator(5, integer=True))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
    panels[0][0].set_ylabel("training loss")
    losses = [loss for row in rows for loss in row["losses"]]
    if max(losses) > 5 * min(losses) > 0:
        panels[0][0].set_yscale("log")
        panels[0][0].yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panels[0][0].yaxis.set_major_formatter("{x:g}")
        panels[0][0].yaxis.set_minor_locator(ticker.NullLocator())
    named = {label: line for panel in panels[0] for line, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    named["full batch at step 1"] = named.pop("full batch at step 1")  # the last one of the legend
    figure.legend(
        named.values(),
        named,
        title="samples per device x micro-batches of a step",
        loc="outside lower center",
        ncols=len(named),
        frameon=False,
    )
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def announce(options: argparse.Namespace) -> None:
    """Print what will run and where the results go, before the first import that takes seconds."""
    counts = {"mode": len(options.modes), "split": len(options.splits), "step": options.steps}
    asked = " x ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in counts.items())
    print(f"{describe(options)}: {asked}, into {options.output}", flush=True)


def environment(options: argparse.Namespace, reference: dict[str, float]) -> dict[str, Any]:
    import torch

    versions = {}
    for name in ("transformers", "accelerate", "torch", "datasets", "tokenizers", "peft", "hf-accum-fix"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "reference": reference,
        "versions": versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "device": "cpu" if on_cpu() else torch.cuda.get_device_name(),
        "processes": options.world,
        "arguments": {name: str(value) for name, value in vars(options).items()},
    }


# ---- 7. The run -------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> None:
    """Runs every cell, then shows and draws all of them."""
    import datasets
    import torch
    import transformers
    from accelerate import PartialState

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    state = PartialState(cpu=on_cpu())
    first, rows = state.is_main_process, []
    checkpoint = str(options.output / "initial_model")
    if options.head == "bert":
        dataset, collate = bert_samples(options)
    else:
        with state.main_process_first():
            conversations = write_digits(options.output / "digits")
            if first:
                build_llava(conversations, Path(checkpoint), options.seed)
        dataset, collate = llava_samples(conversations, options, checkpoint)

    model = initial_model(options, checkpoint).to(state.device).double()
    reference = full_batch(model, [dataset[place] for place in range(options.total_batch)], collate)
    del model
    if first:
        (options.output / "environment.json").write_text(json.dumps(environment(options, reference), indent=1))
    for mode, split in itertools.product(options.modes, options.splits):
        rows.append(run_cell(mode, split, options, checkpoint, dataset, collate))
        if first:
            print(f"{mode} {split}: {rows[-1]['seconds']} s", flush=True)
            with (options.output / "results.jsonl").open("a") as lines:
                lines.write(json.dumps(rows[-1]) + "\n")

    if first:
        rows.sort(key=lambda row: (OFFERED.index(row["mode"]), -row["per_device"]))
        draw_curves(rows, reference, options, options.output / "curves.png")
        show_table(rows, reference, options)
        print(f"wrote results.jsonl, environment.json and curves.png to {options.output.resolve()}", flush=True)
    if options.world > 1:
        torch.distributed.barrier()
        # Do not destroy the process group: gloo's threads may still hold tensors, so that it could abort or hang.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def main(argv: list[str] | None = None) -> int:
    try:
        options = read_options(argv)
        check_output(options)  # last, because it makes the folder, and a refused run leaves none
    except BadInputError as error:
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(f"llava_sweep: {error}\n")
        return 2
    if options.world > int(os.environ.get("WORLD_SIZE", "1")):
        ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={options.world}"]
        os.execv(sys.executable, [sys.executable, *ranks, __file__, *(sys.argv[1:] if argv is None else argv)])
    # the small models gain nothing from threads, which wait for one another where other programs run
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.world == 1:
        # with two visible GPUs the Trainer would use DataParallel
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if os.environ.get("RANK", "0") == "0":
        announce(options)
    sweep(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

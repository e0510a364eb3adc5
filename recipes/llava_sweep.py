r"""One global batch, several splits: the LLaVA-1.5 loss table of LLaMA-Factory #7443, stock and corrected.

    python recipes/llava_sweep.py --steps 3 --total-batch 32 --splits 16x2,1x32     # a first answer, half a minute
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py                # 20 steps, 2 minutes on 2 cores
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py --steps 100    # the published length
    accelerate launch --cpu --num_processes 4 recipes/llava_sweep.py --head bert    # a head wrong on 5.23.0
    python recipes/llava_sweep.py --splits 16x8,1x128 --modes stock,apply           # one process

A split PxG is P samples per device and G micro-batches per optimizer step. The samples of a step are the same
for every split, so its loss and gradient should be too: the mean over the target tokens of the whole step.
Every split runs in every mode, from the same weights, over the same samples, with AdamW:

    stock    the installed transformers.Trainer
    hotfix   LLaMA-Factory's: model_accepts_loss_kwargs = False, so that the Trainer divides by G
    apply    stock under hf_accum_fix.apply()
    trainer  hf_accum_fix.GlobalBatchTrainer
    balanced apply(balance_windows=True), if --modes names it: the same steps, with length-balanced micro-batches

The sweep shows two errors. transformers 4.49.0 adds up the means of the G micro-batches: loss and gradient come out
G times too large. Dividing by G leaves the mean of the micro-batch means, where a one-word answer alone in its
micro-batch counts as much as a long one. For this rest to show, the loss of a token must depend on the length of its
answer, as it does where training starts from a language model that has read text. So the small model first reads the
long answers as plain text, for WARM_UP_STEPS steps, chosen so that the rest is about as large as the published one.

The pictures are scikit-learn's digits, and the conversations are written from their pixels. The output folder gets
results.jsonl (a line per cell: loss and gradient norm of every step, not rounded), environment.json and curves.png.

Source: https://github.com/hiyouga/LLaMA-Factory/issues/7443 (the table), pull request 7448 (the hotfix).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import json
import math
import os
import random
import re
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shared
from shared import IGNORED, Split

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
COLOURS = ("#56B4E9", "#E69F00", "#7A0177", "#009E73")  # distinct for the colour-blind, too

WARM_UP_STEPS = 12
IMAGE_SIZE, PATCH_SIZE = 32, 8  # [pixels]; 4 x 4 patches, 16 image tokens
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

# ---- 1. The options ---------------------------------------------------------------------------------------


def read_options() -> argparse.Namespace:
    parser = shared.Parser(__doc__, "llava_sweep", new=True)
    add = parser.add_argument
    add("--steps", type=shared.positive, default=20, help="optimizer steps of a cell (published: 100)")
    add("--total-batch", type=shared.positive, default=128, help="samples of one optimizer step, over all processes")
    add("--modes", type=shared.some_of(OFFERED), default=list(MODES), help=f"some of {','.join(OFFERED)}")
    add("--splits", type=shared.splits_of, help="such as 16x2,1x32; default: the published ones that fit")
    add("--head", choices=("llava", "bert"), default="llava", help="bert reads digits as 64 words")
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="bfloat16 is mixed precision")
    add("--seed", type=int, default=0, help="of the weights and of the order of the samples")
    options = parser.parse_args()
    options.world = processes_asked_for(parser)
    share, rest = divmod(options.total_batch, options.world)
    fits = [Split(p, g) for gpus, p, g in PUBLISHED if gpus == options.world and p * g == share]
    fits = fits or [Split(p, share // p) for p in (16, 8, 1) if share % p == 0]
    options.splits = options.splits or fits
    if rest or any(split.per_device * split.accumulation != share for split in options.splits):
        parser.error(
            f"got splits {', '.join(map(str, options.splits))} on {options.world} processes; "
            f"expected PxG with P x G x processes = --total-batch {options.total_batch}"
        )
    return options


def processes_asked_for(parser: shared.Parser) -> int:
    """The number of processes of this run, this one included.

    `accelerate launch --cpu --num_processes N` starts one, which does not know N: read it from the launcher's command
    line; `main` then starts them all. Source: https://github.com/huggingface/accelerate/issues/2741
    """
    if "WORLD_SIZE" in os.environ or os.environ.get("ACCELERATE_USE_CPU", "").lower() != "true":
        return int(os.environ.get("WORLD_SIZE", "1"))
    import psutil

    launcher = psutil.Process().parent()
    found = re.search(r"--num[_-]processes[ =](\d+)", " ".join(launcher.cmdline()) if launcher else "")
    if found is None and "MASTER_PORT" in os.environ:  # which accelerate sets for more than one process
        parser.error("got a number of processes from accelerate's file; expected --num_processes N, or torchrun")
    return int(found[1]) if found else 1


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
    """A question about a digit of grey levels [8, 8], and its answer: one word for half, sentences for a third."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    digit, rows, columns = words[label], pixels.sum(1), pixels.sum(0)
    parity = "odd" if label % 2 else "even"
    stroke = "faint" if pixels.mean() < 4.5 else "plain" if pixels.mean() < 5.3 else "heavy"
    half = "upper" if rows[:4].sum() > rows[4:].sum() else "lower"
    side = "left" if columns[:4].sum() > columns[4:].sum() else "right"
    high, wide = words[(rows > 8).sum()], words[(columns > 8).sum()]
    draw = choose.random()
    if draw < 0.5:
        of_digit = [("Which digit is this ?", digit), ("Is the digit odd or even ?", parity)]
        of_ink = [("Which side holds more ink ?", side), ("Is the stroke faint , plain or heavy ?", stroke)]
        question, answer = choose.choice(of_digit + of_ink)
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
    names = {"unk_token": "<unk>", "pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    more = {"additional_special_tokens": ["<image>"]}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=model_of_words, **names, **more)
    square = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pictures = hf.CLIPImageProcessor(size=square, crop_size=square)
    places = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaProcessor(pictures, tokenizer, patch_size=PATCH_SIZE, **places)

    torch.manual_seed(seed)
    width = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 2}
    tower = hf.CLIPVisionConfig(**width, projection_dim=32, image_size=IMAGE_SIZE, patch_size=PATCH_SIZE)
    marks = {"pad_token_id": 1, "bos_token_id": 2, "eos_token_id": 3}
    language = hf.LlamaConfig(**SMALL, **marks, vocab_size=len(vocabulary), max_position_embeddings=2048)
    image = {"image_token_index": ids["<image>"], "image_seq_length": (IMAGE_SIZE // PATCH_SIZE) ** 2}
    config = hf.LlavaConfig(vision_config=tower, text_config=language, pad_token_id=1, **image)
    model = hf.LlavaForConditionalGeneration(config)

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
    if options.head == "bert":
        none = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
        config = hf.BertConfig(**SMALL, **none, vocab_size=18, max_position_embeddings=65, num_labels=10)
        return hf.BertForSequenceClassification(config)
    model = hf.LlavaForConditionalGeneration.from_pretrained(checkpoint).float()
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
        input_ids, labels = [tokenizer.bos_token_id], [IGNORED]
        for prompt, answer in record["turns"]:
            text = f"USER: {prompt} ASSISTANT:".replace("<image>", picture)
            question = tokenizer(text, add_special_tokens=False)["input_ids"]
            reply = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
            input_ids += question + reply
            labels += [IGNORED] * len(question) + reply
        return {"input_ids": input_ids, "labels": labels}

    order = sample_order(len(conversations), options)
    dataset = Dataset.from_list(conversations).map(encode, remove_columns="turns").select(order)
    collate = Collator(tokenizer.pad_token_id, processor.image_processor)
    return dataset.add_column("place", list(range(len(order)))), collate


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
    """Make a micro-batch of samples; remember which ones this rank got, and its tokens with padding and without."""

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
    """The reference, without a Trainer: mean loss over the items of a global batch, and its gradient's norm."""
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


class Recorder(shared.InOrder):
    """Mixin before a Trainer: keep the losses that it logs, and gradient norms, before it rounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.window: list[torch.Tensor] = []
        super().__init__(*args, **kwargs)

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
    mode: str, split: Split, options: argparse.Namespace, checkpoint: str, dataset: Dataset, collate: Collator
) -> dict[str, Any]:
    """Trains one cell from the initial weights and returns its line of results.jsonl."""
    import transformers as hf

    import hf_accum_fix

    shared.forget_accelerator()
    hf.set_seed(options.seed)
    collate.clear()
    started = time.perf_counter()
    # New ones for every cell: one release writes into those it is given. Clipping would hide a factor.
    arguments = shared.arguments(
        options.output, per_device_train_batch_size=split.per_device, gradient_accumulation_steps=split.accumulation,
        max_steps=options.steps, learning_rate=1e-3, lr_scheduler_type="constant", optim="adamw_torch",
        bf16=options.dtype == "bfloat16", seed=options.seed, max_grad_norm=1e9, logging_steps=1,
        logging_strategy="steps", log_level="error", ddp_find_unused_parameters=False,
    )  # fmt: skip
    base = hf_accum_fix.GlobalBatchTrainer if mode == "trainer" else hf.Trainer
    patched = mode in ("apply", "balanced")
    with hf_accum_fix.apply(balance_windows=mode == "balanced") if patched else contextlib.nullcontext():
        model, cell = initial_model(options, checkpoint), type("Cell", (Recorder, base), {})
        trainer = cell(model=model, args=arguments, train_dataset=dataset, data_collator=collate)
        trainer.remove_callback(hf.PrinterCallback)
        if mode == "hotfix":
            trainer.model_accepts_loss_kwargs = False
        trainer.train()
    check_samples(collate.seen, split.accumulation, options)
    row = {"mode": mode, "processes": options.world, **split._asdict()}
    row |= {"seconds": round(time.perf_counter() - started, 1), "padded_over_real": collate.padded / collate.real}
    return {**row, "losses": trainer.losses, "grad_norms": trainer.grad_norms}


def check_samples(seen: list[list[int]], accumulation: int, options: argparse.Namespace) -> None:
    """Check that every step had the samples it has under any other split, by this rank's places in the dataset."""
    from torch.distributed import all_gather_object

    ranks = [seen] * options.world
    if options.world > 1:
        all_gather_object(ranks, seen)
    for step in range(options.steps):
        window = slice(step * accumulation, (step + 1) * accumulation)
        found = sorted(place for rank in ranks for batch in rank[window] for place in batch)
        if found != list(range(step * options.total_batch, (step + 1) * options.total_batch)):
            raise RuntimeError(f"step {step + 1} did not have its own {options.total_batch} samples")


# ---- 6. The results ---------------------------------------------------------------------------------------


def show_table(rows: list[dict[str, Any]], reference: dict[str, float], options: argparse.Namespace) -> None:
    """Prints the published table again, with loss and gradient norm as multiples of the full batch's."""
    print(f"{describe(options)}\nfull batch at step 1: loss {reference['loss']:.4f}, gradient norm "
          f"{reference['grad_norm']:.4f}, {reference['items']} items\n")  # fmt: skip
    head = ("mode", "split", "loss at step 1", "/ full batch", "gradient norm / full batch", f"at step {options.steps}")
    lines = [
        (row["mode"], split_of(row), f"{row['losses'][0]:.4f}", f"{row['losses'][0] / reference['loss']:.6f}",
         f"{row['grad_norms'][0] / reference['grad_norm']:.6f}", f"{row['losses'][-1]:.4f}")
        for row in rows
    ]  # fmt: skip
    release = importlib.metadata.version("transformers")
    if options.head == "llava" and options.total_batch == 128 and release == PUBLISHED_ON:
        for split in options.splits:
            for initial, last in filter(None, [PUBLISHED.get((options.world, *split))]):
                lines.append(("published", split, initial, "", "", last if options.steps == 100 else ""))
    print(shared.markdown(head, lines))
    tolerance = 1e-2 if options.dtype == "bfloat16" else 1e-5
    for mode, of_mode in by_mode(rows).items():
        loss = compare("loss", of_mode, [row["losses"][0] / reference["loss"] for row in of_mode], tolerance)
        norms = [row["grad_norms"][0] / reference["grad_norm"] for row in of_mode]
        print(f"{mode}: {loss}; {compare('gradient norm', of_mode, norms, tolerance)}")


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


def draw_curves(rows: list[dict[str, Any]], reference: dict[str, float], options: argparse.Namespace) -> None:
    """Draws the loss over optimizer steps: one panel per mode, one line per split, one scale, one legend."""
    modes = by_mode(rows)
    figure, panels = shared.figure_of(1, len(modes), (max(2.9 * len(modes), 6) + 0.6, 4.4), sharey=True)
    figure.suptitle(f"The same batches, several splits\n{describe(options)}", wrap=True)
    losses = [loss for row in rows for loss in row["losses"]]
    scale = "log" if max(losses) > 5 * min(losses) > 0 else "linear"
    named = {}
    for panel, (mode, of_mode) in zip(panels[0], modes.items(), strict=True):
        for place, (row, colour) in enumerate(zip(of_mode, itertools.cycle(COLOURS))):
            # each line thinner than the one before, so that lines that coincide all show
            marks = {"marker": "o" if options.steps < 5 else "", "markersize": 14 / 1.6**place}
            label, steps = str(split_of(row)).replace("x", " x "), range(1, options.steps + 1)
            (named[label],) = panel.plot(steps, row["losses"], color=colour, linewidth=7.5 / 2**place, **marks)
        line = panel.axhline(reference["loss"], color="black", linewidth=1, linestyle=":")
        shared.tidy(panel, steps=True, yscale=scale, xlabel="optimizer step", title=mode)
    panels[0][0].set_ylabel("training loss")
    named["full batch at step 1"] = line
    title = "samples per device x micro-batches of a step"
    figure.legend(named.values(), named, title=title, loc="outside lower center", ncols=len(named), frameon=False)
    figure.savefig(options.output / "curves.png", dpi=150)


# ---- 7. The run -------------------------------------------------------------------------------------------


def sweep(options: argparse.Namespace) -> None:
    """Runs every cell, then shows and draws all of them."""
    import datasets
    import transformers
    from accelerate import PartialState

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    state = PartialState(cpu=shared.on_cpu())
    first, rows = state.is_main_process, []
    options.output.mkdir(parents=True, exist_ok=True)
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
        found = {"reference": reference, **shared.environment(options)}
        (options.output / "environment.json").write_text(json.dumps(found, indent=1))
    for mode, split in itertools.product(options.modes, options.splits):
        rows.append(run_cell(mode, split, options, checkpoint, dataset, collate))
        if first:
            print(f"{mode} {split}: {rows[-1]['seconds']} s", flush=True)
            shared.add_line(options.output / "results.jsonl", rows[-1])
    if first:
        rows.sort(key=lambda row: (OFFERED.index(row["mode"]), -row["per_device"]))
        draw_curves(rows, reference, options)
        show_table(rows, reference, options)
        print(f"wrote results.jsonl, environment.json and curves.png to {options.output.resolve()}", flush=True)
    shared.end_ranks()


def main() -> None:
    options = read_options()
    if options.world > int(os.environ.get("WORLD_SIZE", "1")):
        shared.start_ranks(options.world)
    # the small models gain nothing from threads, which wait for one another where other programs run
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if options.world == 1:
        # with two visible GPUs the Trainer would use DataParallel
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    if shared.first_rank():
        print(f"{describe(options)}, into {options.output}", flush=True)
    sweep(options)


if __name__ == "__main__":
    main()

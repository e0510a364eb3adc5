r"""The real `llamafactory-cli train`, stock and corrected: one global batch, every split, on one process and two.

    python recipes/llama_factory.py                        # makes its own environment, then 10 minutes on 2 cores
    python recipes/llama_factory.py --cases llava --processes 1 --output results/llama_factory

Three cases, each a tiny model and 16 samples written to disk: a text model (`text`), a LLaVA (`llava`), and the text
model under `use_asft_loss` (`asft`), a loss that LLaMA-Factory averages over micro-batches, so its answers are of one
length. Every split P x G of the 16 samples takes one step of plain SGD. The whole batch in one micro-batch on one
process is the reference. The stock Trainer runs the first and the last split, `hf-accum-fix run` all of them.

The output folder gets results.jsonl, a line per run. Exit code: 0 if every corrected split is within 1e-3 of the
reference in loss and gradient norm; 1 if not; 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import in_release
import shared

RELEASE = "0.9.5"
ENVIRONMENT = f"llamafactory-{RELEASE}"
#: These three fit together; LLaMA-Factory requires each as a range only.
TORCH = ("torch==2.11.0", "torchvision==0.26.0", "torchaudio==2.11.0")
TRANSFORMERS = "transformers==5.6.0"

TOTAL = 16
TOLERANCE = 1e-3
CASES: dict[str, dict[str, Any]] = {
    "text": {"model_name_or_path": "text", "dataset": "ragged", "template": "default"},
    "llava": {"model_name_or_path": "llava", "dataset": "pictures", "template": "llava"},
    "asft": {"model_name_or_path": "text", "dataset": "even", "template": "default", "use_asft_loss": True},
}
#: One step of plain SGD, nothing clipped, nothing shuffled.
TRAINING = {"stage": "sft", "do_train": True, "finetuning_type": "full", "cutoff_len": 1024, "max_steps": 1}
TRAINING |= {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "max_grad_norm": 1e30}
TRAINING |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none", "use_cpu": True}
TRAINING |= {"disable_shuffling": True, "disable_gradient_checkpointing": True, "overwrite_cache": True}
TRAINING |= {"preprocessing_num_workers": 1}
#: LLaVA under LLaMA-Factory on two ranks requires this, stock or not, besides disabled checkpointing.
TWO_RANKS = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True}


def main(arguments: list[str]) -> int:
    parser = shared.Parser(__doc__, "llama_factory", new=True)
    parser.add_argument("--cases", type=shared.some_of(CASES), default=list(CASES), help=f"some of {','.join(CASES)}")
    parser.add_argument("--processes", type=shared.some_of("12"), default=["1", "2"], help="1, 2 or 1,2")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.write is not None:
        write_models(options.write)
        write_data(options.write)
        return 0
    install = [f"llamafactory=={RELEASE}", TRANSFORMERS, "-e", str(in_release.ROOT)]
    python = in_release.made(ENVIRONMENT, TORCH, install) / in_release.BIN / "python"
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        quiet = {**os.environ, "TQDM_DISABLE": "1"}
        subprocess.run([python, __file__, "--write", work], check=True, env=quiet)
        rows = []
        for row in runs(work, python, options.cases, list(map(int, options.processes))):
            rows.append(row)
            shared.add_line(options.output / "results.jsonl", row)
            print(words(row), flush=True)
    return int(any(row["mode"] == "corrected" and max(row["off"].values()) > TOLERANCE for row in rows))


def runs(work: Path, python: Path, cases: Sequence[str], processes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """One row a run: its log, and the difference from the whole batch in one micro-batch."""
    for case in cases:
        reference = trained(work, python, case, "stock", 1, TOTAL)
        yield {**reference, "off": {"loss": 0.0, "grad_norm": 0.0}}
        for ranks in processes:
            sizes = [size for size in (16, 8, 4, 2, 1) if size * ranks <= TOTAL]
            for mode, size in [("stock", 1), *(("corrected", size) for size in sizes)]:
                row = trained(work, python, case, mode, ranks, size)
                off = {key: abs(row[key] / reference[key] - 1) for key in ("loss", "grad_norm")}
                yield {**row, "off": off}


def trained(work: Path, python: Path, case: str, mode: str, ranks: int, size: int) -> dict[str, Any]:
    """Run llamafactory-cli train once; its first step as logged."""
    steps = TOTAL // (size * ranks)
    name = f"{case}-{mode}-{ranks}x{size}x{steps}"
    config = {
        **TRAINING,
        **(TWO_RANKS if ranks > 1 else {}),
        **CASES[case],
        "model_name_or_path": str(work / CASES[case]["model_name_or_path"]),
        "dataset_dir": str(work),
        "output_dir": str(work / name),
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
    }
    # JSON is YAML.
    (work / f"{name}.yaml").write_text(json.dumps(config))
    scripts = python.parent
    environment = {**os.environ, "PATH": os.pathsep.join([str(scripts), os.environ.get("PATH", "")])}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(work / "cache")}
    if ranks > 1:
        environment |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(ranks)}
    run = [scripts / "hf-accum-fix", "run", "--require", "--"] if mode == "corrected" else []
    command = [*run, scripts / "llamafactory-cli", "train", work / f"{name}.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stdout[-3000:], done.stderr[-6000:], sep="\n", file=sys.stderr)
        raise SystemExit(f"llamafactory-cli failed: {name}")
    state = json.loads((work / name / "trainer_state.json").read_text())
    first = state["log_history"][0]
    row = {"case": case, "mode": mode, "processes": ranks, "per_device": size, "accumulation": steps}
    return {**row, "loss": first["loss"], "grad_norm": first["grad_norm"]}


def words(row: dict[str, Any]) -> str:
    """One row to read."""
    split = f"{row['processes']} x {row['per_device']} x {row['accumulation']}"
    off = row["off"]
    return (
        f"{row['case']:6} {row['mode']:7} {split:11} loss {row['loss']:9.4f} ({off['loss']:.1e} off)   "
        f"gradient norm {row['grad_norm']:9.4f} ({off['grad_norm']:.1e} off)"
    )


# --- what is trained, written by the environment's own transformers -------------------------------------------------


def write_models(folder: Path) -> None:
    import torch
    import transformers as hf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    special = ["<pad>", "<s>", "</s>", "<unk>", "<image>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*special, *alphabet])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    tokenizer = hf.PreTrainedTokenizerFast(tokenizer_object=core, **names, additional_special_tokens=["<image>"])
    # Spread the logits, so that losses differ from token to token as in a trained model.
    small = {"num_hidden_layers": 2, "num_attention_heads": 2}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    text = {"vocab_size": len(vocabulary), "max_position_embeddings": 1024}
    language = hf.LlamaConfig(**small, **marks, **text, hidden_size=32, intermediate_size=48)
    vision = hf.CLIPVisionConfig(**small, hidden_size=16, intermediate_size=24, image_size=16, patch_size=8)
    torch.manual_seed(0)
    hf.LlamaForCausalLM(language).save_pretrained(folder / "text")
    tokenizer.save_pretrained(folder / "text")
    config = hf.LlavaConfig(vision_config=vision, text_config=language, image_token_index=vocabulary["<image>"])
    hf.LlavaForConditionalGeneration(config).save_pretrained(folder / "llava")
    pictures = hf.CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16})
    places = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    processor = hf.LlavaProcessor(image_processor=pictures, tokenizer=tokenizer, patch_size=8, **places)
    processor.save_pretrained(folder / "llava")


def write_data(folder: Path) -> None:
    """Questions with answers of 1 to 61 words in no order, or of one length; one set with a picture each."""
    from PIL import Image

    def sample(index: int, length: int) -> dict[str, str]:
        answer = " ".join(["nothing", "something", "everything"][index * word % 3] for word in range(length))
        return {"instruction": f"Say number {index}.", "input": "", "output": answer}

    ragged = [sample(index, 1 + (index * 7 % TOTAL) * 4) for index in range(TOTAL)]
    even = [{**one, "output": "abcdefghijklmnop"[index:] + "qrstuvw" + "x" * index} for index, one in enumerate(ragged)]
    pictures = []
    for index, one in enumerate(ragged):
        path = folder / f"{index}.png"
        Image.new("RGB", (16, 16), (index * 16, 255 - index * 16, 128)).save(path)
        turns = [
            {"role": "user", "content": f"<image>{one['instruction']}"},
            {"role": "assistant", "content": one["output"]},
        ]
        pictures.append({"messages": turns, "images": [str(path)]})
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images"}
    described = {
        "ragged": {"file_name": "ragged.json"},
        "even": {"file_name": "even.json"},
        "pictures": {"file_name": "pictures.json", "formatting": "sharegpt", "columns": columns, "tags": tags},
    }
    (folder / "dataset_info.json").write_text(json.dumps(described))
    for name, rows in {"ragged": ragged, "even": even, "pictures": pictures}.items():
        (folder / f"{name}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

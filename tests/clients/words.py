"""A language of words: a tokenizer built in memory, and prompts with answers of every length."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.numerics.heads import VOCABULARY

SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>")
WORDS = tuple(f"w{index}" for index in range(VOCABULARY - len(SPECIAL)))

#: Words of the prompt and of the answer.
LENGTHS = ((3, 9), (2, 2), (5, 14), (1, 1), (4, 6), (2, 11), (6, 3), (3, 17))


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a word; nothing is merged across the boundary of prompt and answer."""
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *WORDS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **names)


def prompts_and_answers(seed: int = 0) -> list[dict[str, Any]]:
    """Eight samples of ``prompt``, ``good`` and ``bad``, two answers of different lengths."""
    g = torch.Generator().manual_seed(seed)

    def words(count: int) -> str:
        return "".join(f" {WORDS[int(index)]}" for index in torch.randint(0, len(WORDS), (count,), generator=g))

    return [{"prompt": words(p), "good": words(a), "bad": words(1 + a // 2)} for p, a in LENGTHS]

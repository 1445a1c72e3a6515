"""The small model's tokenizer and text encoder: a word-level vocabulary in Qwen's chat format, and a small Qwen3.5.

Both are used as PAN2's are: the prompt goes through the chat template, and `hidden_states[-3]` of what follows the user
header is the conditioning. Of the four layers two are therefore alive.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, Qwen3_5TextModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from engine.prompt import SYSTEM_MESSAGE, tokenize, trim
from presets.tiny.vocabulary import UNKNOWN, known_words, words

LAYERS, WIDTH, HEADS, HEAD_SIZE = 4, 192, 3, 64
SPECIAL = (UNKNOWN, "<|endoftext|>", "<|im_start|>", "<|im_end|>")
PUNCTUATION = tuple("\n.,!?:;'\"-()")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def new_tokenizer() -> PreTrainedTokenizerFast:
    """Lower case, split at anything but letters and digits, one token a word; unknown words become one and the same."""
    table = [*SPECIAL, *PUNCTUATION, "system", "user", "assistant", *words(SYSTEM_MESSAGE), *known_words()]
    vocabulary = {word: index for index, word in enumerate(dict.fromkeys(table))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    # The line break after a role is a token of its own, as in Qwen's vocabulary.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n|\w+|[^\w\s]"), behavior="removed", invert=True)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=UNKNOWN,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def text_config(vocabulary_size: int) -> Qwen3_5TextConfig:
    return Qwen3_5TextConfig(
        vocab_size=vocabulary_size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=2048,
        layer_types=["full_attention"] * LAYERS,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        # Weights are trained under bf16 autocast and stored so.
        dtype="bfloat16",
    )


def new_text_model(vocabulary_size: int) -> nn.Module:
    return Qwen3_5TextModel(text_config(vocabulary_size)).float()


class PromptIds:
    """Token ids of many prompts, exactly as `engine.prompt.tokenize` makes them, the template run only once."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        whole = tokenize(tokenizer, " ")
        self.start = whole.start
        self.before, self.after = whole.ids[: whole.start], whole.ids[whole.start :]

    def __call__(self, prompts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
        return [self.before + ids + self.after for ids in encoded]


class TrainableText(nn.Module):
    """Ids [B, L] of equal length to the conditioning [B, L - start, WIDTH]."""

    def __init__(self, model: nn.Module, start: int) -> None:
        super().__init__()
        self.model = trim(model)
        self.start = start

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, use_cache=False).last_hidden_state[:, self.start :]


def equal_lengths(ids: Sequence[Sequence[int]], device: torch.device | str) -> dict[int, tuple[Tensor, Tensor]]:
    """Group id lists by length: {length: (their positions [m], ids [m, length])}. There is no padding anywhere."""
    groups: dict[int, list[int]] = {}
    for position, row in enumerate(ids):
        groups.setdefault(len(row), []).append(position)
    return {
        length: (torch.tensor(rows, device=device), torch.tensor([ids[r] for r in rows], device=device))
        for length, rows in groups.items()
    }

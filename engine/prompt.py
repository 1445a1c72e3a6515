"""Prompt to text embedding: what the transformer reads of a prompt, and the part of the text model that makes it.

PAN2 conditions on `hidden_states[-3]` of Qwen3.5's text model: the output of the last layer but two, without the final
norm. The last two layers and the norm influence nothing, so they are dropped and their weights need not be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.errors import CheckpointError, EngineError, RequestError

SYSTEM_MESSAGE = "You are a helpful assistant. Generate the video with the following instructions."
USER_HEADER = "<|im_start|>user\n"
MAX_TOKENS = 1536
DEAD_LAYERS = 2
PROBES = ("a red ball rolls", "a red ball stops")
_OTHER = "Use the tokenizer folder that belongs to the checkpoint."


@dataclass(frozen=True)
class PromptTokens:
    """ids: what the text model sees; start: where the conditioning begins in them; cut: tokens that did not fit."""

    ids: list[int]
    start: int
    cut: int

    @property
    def used(self) -> int:
        """Tokens that reach the transformer."""
        return len(self.ids) - self.start

    @property
    def total(self) -> int:
        """Tokens of the prompt as it was written; more than `used` where it was too long."""
        return self.used + self.cut


@dataclass(frozen=True)
class TextEmbedding:
    """embedding: [1, tokens, width] in the text model's dtype, on its device; cut: tokens that did not fit."""

    embedding: torch.Tensor
    tokens: int
    cut: int

    @property
    def warning(self) -> str | None:
        """A sentence for the user if the end of the prompt was cut off, else None."""
        if not self.cut:
            return None
        return (
            f"The prompt is {self.tokens + self.cut} tokens long and the model reads {self.tokens}: "
            f"the last {self.cut} were cut off. Shorten the prompt to keep its end."
        )


def crop(ids: Sequence[int], header: Sequence[int], limit: int = MAX_TOKENS) -> PromptTokens:
    """Find where the conditioning starts (after the first `header` in `ids`) and cut what exceeds `limit` tokens of it.

    Raises CheckpointError if the header does not occur: then the tokenizer's chat template is not the model's.
    """
    ids, header = list(ids), list(header)
    for position in range(len(ids) - len(header) + 1):
        if header and ids[position : position + len(header)] == header:
            start = position + len(header)
            return PromptTokens(ids[: start + limit], start, max(0, len(ids) - start - limit))
    raise CheckpointError(
        f"The tokens of {USER_HEADER!r} do not occur in what the tokenizer's chat template makes of a prompt, so it is "
        f"unknown where the prompt starts. {_OTHER}"
    )


def tokenize(tokenizer: Any, prompt: str | None) -> PromptTokens:
    """A prompt in the checkpoint's chat template, with generation prompt, cropped and cut. Empty or None: one space.

    Raises RequestError for text that is not valid Unicode and CheckpointError if the template fails or lacks the user
    header.
    """
    prompt = prompt or " "
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(
            f"The prompt holds half a character (a lone surrogate) at position {error.start}. Type it again."
        ) from error
    ids = _apply_template(tokenizer, prompt, tokenize=True, return_dict=False)
    return crop(ids, tokenizer.encode(USER_HEADER, add_special_tokens=False))


def _apply_template(tokenizer: Any, prompt: str, **options: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM_MESSAGE}, {"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, **options)
    except MemoryError:
        raise
    except Exception as error:  # a template is a program, and fails like one
        raise CheckpointError(
            f"The tokenizer's chat template fails on a prompt ({type(error).__name__}: {error}). {_OTHER}"
        ) from error


def check_template(tokenizer: Any) -> None:
    """Raises CheckpointError unless the tokenizer's chat template works and shows the model what the prompt says.

    Compares text, because a small vocabulary may have the same tokens for different words.
    """
    tokenize(tokenizer, PROBES[0])
    texts = {_apply_template(tokenizer, prompt, tokenize=False) for prompt in PROBES}
    if len(texts) < len(PROBES):
        raise CheckpointError(
            f"The tokenizer's chat template makes the same text of {' and '.join(map(repr, PROBES))}, so it leaves the "
            f"prompt out. {_OTHER}"
        )


def count_tokens(tokenizer: Any, prompt: str | None) -> int:
    """How many of the `MAX_TOKENS` tokens a prompt takes, the chat template's ending included; may be more than fit."""
    return tokenize(tokenizer, prompt).total


def dead_prefixes(config: Any) -> tuple[str, ...]:
    """Prefixes of the text model's parameters that influence nothing and need not be loaded (0.8 GiB as released)."""
    last = config.num_hidden_layers
    return (*(f"layers.{i}." for i in range(last - DEAD_LAYERS, last)), "norm.")


def trim(model: nn.Module) -> nn.Module:
    """Drop what comes after `hidden_states[-3]`, in place, so that `last_hidden_state` is that state.

    Works on meta tensors too; a trimmed model stays as it is. Raises CheckpointError for a model too shallow for it.
    """
    depth = model.config.num_hidden_layers
    if depth < DEAD_LAYERS:
        raise CheckpointError(
            f"The text encoder has {depth} layers and hidden_states[-3] needs at least {DEAD_LAYERS}. "
            "Check its config.json."
        )
    model.layers = model.layers[: depth - DEAD_LAYERS]
    model.norm = nn.Identity()
    return model


class TextEncoder:
    """Prompts to embeddings.

    tokenizer: the checkpoint's; model: transformers' `Qwen3_5TextModel`, trimmed here if it is not yet; it stays on its
    device and in its dtype.
    """

    def __init__(self, tokenizer: Any, model: nn.Module) -> None:
        self.tokenizer = tokenizer
        self.model = trim(model).eval()

    def count(self, prompt: str | None) -> int:
        """Tokens of a prompt, see `count_tokens`."""
        return count_tokens(self.tokenizer, prompt)

    @torch.no_grad()
    def encode(self, prompt: str | None) -> TextEmbedding:
        """The embedding of one prompt, [1, L, D] with its true length L (no padding, no mask).

        Raises EngineError if the text model yields nothing usable (not finite, or all zero).
        """
        tokens = tokenize(self.tokenizer, prompt)
        ids = torch.tensor([tokens.ids], device=self.model.embed_tokens.weight.device)
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state
        # A copy, so that the part before the crop is not kept alive with it.
        embedding = hidden[:, tokens.start :].clone()
        _check(embedding)
        return TextEmbedding(embedding, tokens.used, tokens.cut)


def _check(embedding: torch.Tensor) -> None:
    if not torch.isfinite(embedding).all():
        raise EngineError(
            f"The text encoder ({embedding.dtype}) gave values that are not finite. Its weights are damaged, or its "
            "precision is too small: load it in bf16 or fp32."
        )
    if not embedding.any():
        raise CheckpointError("The text encoder gave only zeros, so its weights were not loaded. Download them again.")

"""Files to modules: a checkpoint in diffusers' folder layout, wherever it is.

`resolve` finds or fetches the folder, `describe` tells what is in it without reading weights, the `load_*` functions
build the parts. Every part is built on the meta device from its config file and then filled tensor by tensor, so that
neither a second copy of the weights nor a forgotten tensor can exist.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.errors import CheckpointError, EngineError
from engine.fp8 import E4M3, convert
from engine.hub import resolve, verify
from engine.memory import advice, memory_in_words, require_memory
from engine.mmdit import PAN2Transformer3DModel
from engine.offload import BlockStream
from engine.parts import (
    Description,
    Part,
    check_agreement,
    describe,
    plain_plan,
    read_config,
    text_entries,
    transformer_plan,
)
from engine.prompt import TextEncoder, check_template, trim
from engine.weights import Entry, Plan, Progress, check_tensors, fill, list_tensors, placement, refuse_meta

if TYPE_CHECKING:  # diffusers and transformers take seconds to import, which `describe` and --help need not wait for
    from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "Description",
    "Part",
    "describe",
    "load_scheduler",
    "load_text_encoder",
    "load_tokenizer",
    "load_transformer",
    "load_vae",
    "resolve",
    "verify",
]

SAMPLED_ROWS = 4096


def load_transformer(
    folder: Path | str,
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
    fp8: bool = False,
    stream: bool = False,
) -> PAN2Transformer3DModel:
    """The transformer of a checkpoint folder, in `dtype` on `device`, for inference.

    Its `norm1.linear` layers stay float32 on the host, memory-mapped. fp8: most matrices become e4m3 as they come from
    the file, one after the other; stream: the blocks live on the host and visit the device. Raises CheckpointError for
    files that are missing, damaged or do not fit, ResourceError if the device is too small.
    """
    folder, device = Path(folder), torch.device(device)
    parts = [part for part in ("transformer", "vae", "text_encoder") if (folder / part).is_dir()]
    configs = {part: read_config(folder, part) for part in dict.fromkeys(("transformer", *parts))}
    check_agreement(configs)
    model = _build(folder / "transformer", lambda: PAN2Transformer3DModel(**configs["transformer"]))
    if fp8:
        convert(model, through=device)
    stored = list_tensors(folder / "transformer")
    _load(model, folder / "transformer", stored, transformer_plan(device, dtype, stream), progress)
    if stream:
        BlockStream(model.transformer_blocks, device)
    return model


def load_vae(
    folder: Path | str, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> AutoencoderKLWan:
    """The video autoencoder of a checkpoint folder, in `dtype` on `device`. Errors as of `load_transformer`."""
    from diffusers import AutoencoderKLWan

    folder, device = Path(folder), torch.device(device)
    config = read_config(folder, "vae")
    # Older configurations name settings that the class no longer has; it would print a warning for each.
    known = {name: value for name, value in config.items() if name in signature(AutoencoderKLWan).parameters}
    model = _build(folder / "vae", lambda: AutoencoderKLWan(**known))
    return _load(model, folder / "vae", list_tensors(folder / "vae"), plain_plan(device, dtype), progress)


def load_text_encoder(
    folder: Path | str, device: torch.device | str, dtype: torch.dtype, progress: Progress | None = None
) -> TextEncoder:
    """Tokenizer and text model of a checkpoint folder, without the layers that influence nothing.

    The model is in `dtype` on `device`. Errors as of `load_transformer`.
    """
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    where, device = Path(folder) / "text_encoder", torch.device(device)
    values = read_config(Path(folder), "text_encoder")
    tokenizer = load_tokenizer(folder)
    model = _build(where, lambda: trim(Qwen3_5TextModel(Qwen3_5TextConfig.from_dict(values))))
    entries = text_entries(where, list_tensors(where), values["num_hidden_layers"])
    # Its tables are computed, not stored, so those of the meta device are empty.
    model.rotary_emb = type(model.rotary_emb)(model.config).to(device)
    model = _load(model, where, entries, plain_plan(device, dtype), progress)
    _check_embedding(where, model.embed_tokens.weight)
    return TextEncoder(tokenizer, model)


def load_scheduler(folder: Path | str) -> FlowMatchEulerDiscreteScheduler:
    """The scheduler of a checkpoint folder, as configured there. Raises CheckpointError if it is another one."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    values = read_config(Path(folder), "scheduler")
    try:
        return FlowMatchEulerDiscreteScheduler.from_config(values)
    except Exception as error:  # settings that it does not need for PAN2 and looks at all the same
        where = Path(folder) / "scheduler" / "scheduler_config.json"
        raise CheckpointError(f"{where} describes an impossible scheduler: {error}. Download it again.") from error


def _build(where: Path, make: Callable[[], nn.Module]) -> nn.Module:
    """A module without memory. Raises CheckpointError, with the reason, if its configuration is impossible."""
    try:
        with torch.device("meta"):
            return make()
    except EngineError:
        raise
    except Exception as error:  # the libraries raise whatever their layers do
        raise CheckpointError(f"{where / 'config.json'} describes an impossible model: {error}.") from error


def _load(
    model: nn.Module,
    where: Path,
    entries: dict[str, Entry],
    plan: Plan,
    progress: Progress | None,
) -> nn.Module:
    """Check that the stored tensors are the model's and that they fit into memory, then fill the model with them."""
    check_tensors(where, {name: tuple(value.shape) for name, value in model.state_dict().items()}, entries)
    device = plan[-1][1].device
    parameters = dict(model.named_parameters())
    needed = sum(
        entry.numel * (1 if parameters[name].dtype == E4M3 else placement(plan, name).dtype.itemsize)
        for name, entry in entries.items()
        if not placement(plan, name).mapped and placement(plan, name).device == device
    )
    what = f"The {where.name.replace('_', ' ')} of {where.parent}"
    require_memory(what, needed, device, advice(device))
    with memory_in_words(what, needed, device, advice(device)):
        if isinstance(model, PAN2Transformer3DModel):
            model.reserve(lambda name: (placement(plan, name).device, placement(plan, name).dtype))
        fill(model, entries, plan, where.name, progress)
    refuse_meta(model, where)
    return model.eval().requires_grad_(False)


def load_tokenizer(folder: Path | str) -> PreTrainedTokenizerBase:
    """The tokenizer of a checkpoint folder. CheckpointError if it can't be read or does not suit the text encoder."""
    from transformers import AutoTokenizer

    where, vocabulary = Path(folder) / "tokenizer", read_config(Path(folder), "text_encoder")["vocab_size"]
    if not where.is_dir():
        raise CheckpointError(f"{where} is missing. Download tokenizer/ again; the checkpoint is incomplete.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library raises whatever its parsers do
        raise CheckpointError(f"{where} can't be read as a tokenizer: {error}. Download it again.") from error
    if not tokenizer.chat_template:
        raise CheckpointError(
            f"{where} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json), which "
            "decides how the model reads a prompt. Download it again."
        )
    if len(tokenizer) > vocabulary:
        raise CheckpointError(
            f"{where} has {len(tokenizer)} tokens and the text encoder's vocabulary {vocabulary}. "
            "Use tokenizer and text_encoder of one checkpoint."
        )
    try:
        check_template(tokenizer)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from error
    return tokenizer


def _check_embedding(where: Path, weight: torch.Tensor) -> None:
    """A library change once left such an embedding all zero, without an error; the prompt then changes nothing."""
    rows = weight[:: max(1, len(weight) // SAMPLED_ROWS)].float()
    if not rows.any() or not rows.isfinite().all():
        what = "only zeros" if rows.isfinite().all() else "values that are not finite"
        raise CheckpointError(f"The token embedding of {where} holds {what}. Download it again.")

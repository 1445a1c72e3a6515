"""A complete checkpoint in the released layout, tiny and random: what loader and engine run on in tests.

The transformer's tensors are written from the published list of names, not from our own model, so that loading it also
tests the names.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HEADS, HEAD_DIM, LAYERS, REFINERS = 2, 16, 2, 1
DIM = HEADS * HEAD_DIM
TEXT_DIM = 24
TEXT_LAYERS = 4

TRANSFORMER = {
    "_class_name": "PAN2Transformer3DModel",
    "_diffusers_version": "0.36.0",
    "patch_size": [1, 2, 2],
    "in_channels": 97,
    "out_channels": 48,
    "num_attention_heads": HEADS,
    "attention_head_dim": HEAD_DIM,
    "num_layers": LAYERS,
    "num_refiner_layers": REFINERS,
    "mlp_ratio": 2.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 2.0,
    "text_embed_dim": TEXT_DIM,
    "rope_axes_dim": [4, 6, 6],
    "rope_theta": 256.0,
    "rope_temporal_scale": 16 / 24,
}
VAE = {
    "_class_name": "AutoencoderKLWan",
    "_diffusers_version": "0.36.0",
    "attn_scales": [],
    "base_dim": 8,
    "clip_output": False,
    "decoder_base_dim": 8,
    "dim_mult": [1, 2, 4, 4],
    "dropout": 0.0,
    "in_channels": 12,
    "is_residual": True,
    "num_res_blocks": 1,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "temperal_downsample": [False, True, True],
    "z_dim": 48,
}
TEXT = {
    "architectures": ["Qwen3_5TextModel"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 272,
    "hidden_size": TEXT_DIM,
    "intermediate_size": 32,
    "num_hidden_layers": TEXT_LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
    "tie_word_embeddings": False,
}
SCHEDULER = {
    "_class_name": "FlowMatchEulerDiscreteScheduler",
    "_diffusers_version": "0.36.0",
    "num_train_timesteps": 1000,
    "shift": 9.0,
    "use_dynamic_shifting": False,
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
CHAT_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n<think>\\n' }}
{%- endif %}"""


def transformer_shapes(c: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a PAN2 transformer, as published, for a config.json."""
    d, head = c["num_attention_heads"] * c["attention_head_dim"], c["attention_head_dim"]
    inner, context, refiner = (int(d * c[f"{name}mlp_ratio"]) for name in ("", "context_", "refiner_"))
    shapes = {"x_embedder.weight": (d, c["in_channels"], *c["patch_size"]), "x_embedder.bias": (d,)}

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)

    linear("time_embedder.linear_1", d, 256)
    linear("time_embedder.linear_2", d, d)
    shapes["context_embedder.0.weight"] = (c["text_embed_dim"],)
    linear("context_embedder.1", d, c["text_embed_dim"])
    shapes["context_type_embedding"] = (d,)
    for i in range(c["num_refiner_layers"]):
        block = f"context_refiner.{i}"
        shapes |= {f"{block}.{norm}.weight": (d,) for norm in ("norm1", "norm2")}
        shapes |= {f"{block}.attn.{norm}.weight": (head,) for norm in ("norm_q", "norm_k")}
        for name in ("to_q", "to_k", "to_v", "to_out.0"):
            linear(f"{block}.attn.{name}", d, d, bias=False)
        linear(f"{block}.ff.net.0.proj", 2 * refiner, d, bias=False)
        linear(f"{block}.ff.net.2", d, refiner, bias=False)
    for i in range(c["num_layers"]):
        block = f"transformer_blocks.{i}"
        linear(f"{block}.norm1.linear", 6 * d, d)
        shapes[f"{block}.scale_shift_table_context"] = (6 * d,)
        for name in ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"):
            linear(f"{block}.attn.{name}", d, d)
        for norm in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            shapes[f"{block}.attn.{norm}.weight"] = (head,)
        for name, width in (("ff", inner), ("ff_context", context)):
            linear(f"{block}.{name}.net.0.proj", width, d)
            linear(f"{block}.{name}.net.2", d, width)
    linear("norm_out.linear", 2 * d, d)
    linear("proj_out", c["out_channels"] * 4, d)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Float32 values that keep activations near 1: matrices scaled by their fan-in, norms near 1, the rest small."""
    values = torch.randn(shape, generator=generator)
    if name.endswith("gamma") or (len(shape) == 1 and name.endswith("weight")):
        return 1 + 0.1 * values
    if len(shape) == 1:
        return 0.1 * values
    return values if "embed_tokens" in name else values * (shape[0] / values.numel()) ** 0.5


def write_toy_checkpoint(folder: Path | str, seed: int = 0) -> Path:
    """Write a checkpoint: 0.3 M parameters, the same bytes for the same seed. Returns the folder."""
    folder, generator = Path(folder), torch.Generator().manual_seed(seed)
    _write_transformer(folder / "transformer", generator)
    _write_vae(folder / "vae", generator)
    _write_text_encoder(folder / "text_encoder", generator)
    write_tokenizer(folder / "tokenizer")
    write_json(folder / "scheduler" / "scheduler_config.json", SCHEDULER)
    write_json(folder / "modular_model_index.json", {"_class_name": "PAN2ModularPipeline"})
    return folder


def write_json(path: Path, values: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _write_transformer(folder: Path, generator: torch.Generator) -> None:
    tensors = {name: random_tensor(name, s, generator) for name, s in transformer_shapes(TRANSFORMER).items()}
    tensors = {n: t if ".norm1.linear." in n else t.bfloat16() for n, t in tensors.items()}
    write_json(folder / "config.json", TRANSFORMER)
    write_shards(folder, "diffusion_pytorch_model", tensors, shards=3)


def write_shards(folder: Path, stem: str, tensors: dict[str, torch.Tensor], shards: int) -> None:
    """Weights in several files with their index, as both libraries name them; one file without index for one shard."""
    folder.mkdir(parents=True, exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / f"{stem}.safetensors", metadata={"format": "pt"})
        return
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05d}-of-{shards:05d}.safetensors"
        chosen = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: tensors[name] for name in chosen}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(chosen, file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    write_json(folder / f"{stem}.safetensors.index.json", index)


def _write_vae(folder: Path, generator: torch.Generator) -> None:
    from diffusers import AutoencoderKLWan

    mean = (0.3 * torch.randn(48, generator=generator)).tolist()
    std = (0.5 + torch.rand(48, generator=generator)).tolist()
    config = VAE | {"latents_mean": mean, "latents_std": std}
    with torch.device("meta"):
        model = AutoencoderKLWan(**{k: v for k, v in config.items() if k[0] != "_" and k != "clip_output"})
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tensors = {name: random_tensor(name, shape, generator) for name, shape in shapes.items()}
    write_json(folder / "config.json", config)
    write_shards(folder, "diffusion_pytorch_model", tensors, shards=1)


def _write_text_encoder(folder: Path, generator: torch.Generator) -> None:
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    with torch.device("meta"):
        model = Qwen3_5TextModel(Qwen3_5TextConfig.from_dict(TEXT))
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    tensors = {name: random_tensor(name, shape, generator).bfloat16() for name, shape in shapes.items()}
    write_json(folder / "config.json", TEXT)
    write_shards(folder, "model", tensors, shards=1)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, so that different prompts always give different tokens, with Qwen's chat format."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", settings | {"model_max_length": 4096})
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")

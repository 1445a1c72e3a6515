"""What a checkpoint consists of: the configurations of its parts, whether they fit each other, and what they weigh.

Only configuration files and the headers of weight files are read here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from engine import shapes
from engine.errors import CheckpointError
from engine.mmdit import MMDiTConfig
from engine.offload import STREAMED
from engine.prompt import dead_prefixes
from engine.schedule import check_config
from engine.weights import Entry, Placement, Plan, list_tensors, placement, read_json, some

CLASSES = {
    "transformer": "PAN2Transformer3DModel",
    "vae": "AutoencoderKLWan",
    "scheduler": "FlowMatchEulerDiscreteScheduler",
}
HOST_PATTERN = "transformer_blocks.*.norm1.linear.*"
TEXT_TYPE = "qwen3_5_text"
TEXT_NUMBERS = ("hidden_size", "num_hidden_layers", "vocab_size")
TEXT_PREFIXES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
NOT_TEXT = tuple(f"{start}{part}." for start in ("", "model.") for part in ("visual", "mtp", "lm_head"))


@dataclass(frozen=True)
class Part:
    """What a part consists of. kind: its class; parameters, bytes, files: on disk; dtypes: parameters by stored dtype;
    resident: parameters that go to the device; mapped: bytes that stay in their file."""

    name: str
    kind: str
    parameters: int
    bytes: int
    dtypes: dict[str, int]
    files: int
    resident: int
    mapped: int
    config: dict[str, Any]

    def device_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the device that the part takes when it is loaded in `dtype`."""
        return self.resident * dtype.itemsize


@dataclass(frozen=True)
class Description:
    """A checkpoint by its configurations and file headers."""

    folder: Path
    transformer: Part
    vae: Part
    text_encoder: Part

    @property
    def parts(self) -> tuple[Part, Part, Part]:
        return self.transformer, self.vae, self.text_encoder

    @property
    def parameters(self) -> int:
        return sum(part.parameters for part in self.parts)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)


def describe(folder: Path | str) -> Description:
    """What a checkpoint holds, read from configurations and headers alone (no weights, in a fraction of a second).

    Raises CheckpointError where parts are missing, incomplete or do not fit each other.
    """
    folder = Path(folder)
    configs = {part: read_config(folder, part) for part in ("transformer", "vae", "text_encoder")}
    check_agreement(configs)
    read_config(folder, "scheduler")
    device = torch.device("cpu")
    transformer = _part(folder, "transformer", configs["transformer"], transformer_plan(device, torch.float32))
    vae = _part(folder, "vae", configs["vae"], plain_plan(device, torch.float32))
    text = _part(folder, "text_encoder", configs["text_encoder"], plain_plan(device, torch.float32))
    return Description(folder, transformer, vae, text)


def released() -> Description:
    """The release by its published numbers, for as long as its files are not here: 29.2 B parameters, a text encoder of
    7.94 B less the two layers that are never loaded, Wan 2.2's VAE."""
    config = MMDiTConfig()
    mapped = config.num_layers * 6 * config.dim * (config.dim + 1)
    sizes = {"transformer": 29_201_996_992, "vae": 704_700_000, "text_encoder": 7_510_000_000}
    configs = {"transformer": vars(config), "vae": {"decoder_base_dim": 256, "base_dim": 160}, "text_encoder": {}}
    parts = [
        Part(
            name=name,
            kind=CLASSES.get(name, "Qwen3_5TextModel"),
            parameters=parameters,
            bytes=0,
            dtypes={},
            files=0,
            resident=parameters - (mapped if name == "transformer" else 0),
            mapped=4 * mapped if name == "transformer" else 0,
            config=configs[name],
        )
        for name, parameters in sizes.items()
    ]
    return Description(Path("IFM/PAN2"), *parts)


def _part(folder: Path, name: str, config: dict[str, Any], plan: Plan) -> Part:
    stored = list_tensors(folder / name)
    live = text_entries(folder / name, stored, config["num_hidden_layers"]) if name == "text_encoder" else stored
    mapped = {n: e for n, e in live.items() if placement(plan, n).mapped}
    dtypes: dict[str, int] = {}
    for entry in stored.values():
        dtypes[entry.dtype] = dtypes.get(entry.dtype, 0) + entry.numel
    return Part(
        name=name,
        kind=CLASSES.get(name, "Qwen3_5TextModel"),
        parameters=sum(dtypes.values()),
        bytes=sum(entry.nbytes for entry in stored.values()),
        dtypes=dtypes,
        files=len({entry.file for entry in stored.values()}),
        resident=sum(e.numel for n, e in live.items() if n not in mapped),
        mapped=sum(e.nbytes for e in mapped.values()),
        config=config,
    )


def read_config(folder: Path, part: str) -> dict[str, Any]:
    """A part's checked configuration; the text encoder's is taken out of a multimodal one."""
    path = folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json")
    values = read_json(path)
    if part == "text_encoder":
        return _text_config(path, values)
    if (found := values.get("_class_name")) != CLASSES[part]:
        raise CheckpointError(
            f"{path} is of class {found!r} and must be of {CLASSES[part]!r}. "
            f"Use the {part} folder of a PAN2 checkpoint."
        )
    if part == "transformer":
        _check_transformer(path, values)
    if part == "vae":
        _check_vae(path, values)
    if part == "scheduler":
        _check_scheduler(path, values)
    return values


def _check_transformer(path: Path, values: dict[str, Any]) -> None:
    try:
        MMDiTConfig.read(values)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}.") from error


def _check_scheduler(path: Path, values: dict[str, Any]) -> None:
    try:
        check_config(values)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _check_vae(path: Path, values: dict[str, Any]) -> None:
    """The factors that engine/shapes.py is written for, as declared and as its layers make them."""
    patch = values.get("patch_size")
    multiplied = _product(values.get("dim_mult"), values.get("temperal_downsample"), patch)
    needed = {
        "z_dim": (values.get("z_dim"), shapes.LATENT_CHANNELS),
        "patch_size": (patch, shapes.PATCH),
        "scale_factor_spatial": (values.get("scale_factor_spatial"), shapes.SPATIAL_FACTOR),
        "scale_factor_temporal": (values.get("scale_factor_temporal"), shapes.TEMPORAL_FACTOR),
        "the factor of its layers in space": (multiplied[0], shapes.SPATIAL_FACTOR),
        "the factor of its layers in time": (multiplied[1], shapes.TEMPORAL_FACTOR),
        "in_channels": (values.get("in_channels"), 3 * shapes.PATCH**2),
        "out_channels": (values.get("out_channels"), 3 * shapes.PATCH**2),
        "the length of latents_mean": (_length(values.get("latents_mean")), shapes.LATENT_CHANNELS),
        "the length of latents_std": (_length(values.get("latents_std")), shapes.LATENT_CHANNELS),
    }
    wrong = [f"{name} is {found} and must be {right}" for name, (found, right) in needed.items() if found != right]
    wrong = wrong or _wrong_stats(values["latents_mean"], values["latents_std"])
    if wrong:
        raise CheckpointError(f"{path} does not describe Wan 2.2's video autoencoder: {'; '.join(wrong)}.")


def _length(values: Any) -> int | None:
    return len(values) if isinstance(values, list) else None


def _wrong_stats(mean: list[Any], std: list[Any]) -> list[str]:
    """What is wrong with the statistics of the latents, which are calculated with in float32."""
    limits = torch.finfo(torch.float32)
    wrong = []
    if not all(_is_number(value) and abs(value) <= limits.max for value in mean):
        wrong.append("latents_mean must be finite numbers throughout")
    if not all(_is_number(value) and limits.tiny <= value <= limits.max for value in std):
        wrong.append("latents_std must be positive, finite numbers throughout")
    return wrong


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _product(multipliers: Any, in_time: Any, patch: Any) -> tuple[int | None, int | None]:
    """Compression in space and time that the VAE's levels and patches add up to."""
    if not isinstance(multipliers, list) or not isinstance(in_time, list) or not isinstance(patch, int):
        return None, None
    return patch * 2 ** (len(multipliers) - 1), 2 ** sum(map(bool, in_time))


def _text_config(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    config = values.get("text_config", values)
    if not isinstance(config, dict) or config.get("model_type") != TEXT_TYPE:
        found = config.get("model_type") if isinstance(config, dict) else config
        raise CheckpointError(
            f"{path} is of model_type {found!r} and must be {TEXT_TYPE!r} (or hold such a text_config). "
            "Use the text_encoder folder of a PAN2 checkpoint."
        )
    missing = [key for key in TEXT_NUMBERS if not isinstance(config.get(key), int)]
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}. Download it again.")
    return config


def check_agreement(configs: dict[str, dict[str, Any]]) -> None:
    """Raises CheckpointError where one part's numbers do not fit another's."""
    transformer = MMDiTConfig.read(configs["transformer"])
    pairs = []
    if vae := configs.get("vae"):
        z = vae["z_dim"]
        pairs.append(("out_channels", transformer.out_channels, z, f"the VAE's z_dim {z}"))
        pairs.append(("in_channels", transformer.in_channels, 2 * z + 1, f"2 z_dim + 1 of the VAE's z_dim {z}"))
    if text := configs.get("text_encoder"):
        width = text["hidden_size"]
        pairs.append(("text_embed_dim", transformer.text_embed_dim, width, f"the text encoder's hidden_size {width}"))
    wrong = [f"{name} is {found} and must be {right}, {why}" for name, found, right, why in pairs if found != right]
    if wrong:
        raise CheckpointError(
            f"The transformer does not fit the other parts: {'; '.join(wrong)}. Use the parts of one checkpoint."
        )


def text_entries(where: Path, stored: dict[str, Entry], layers: int) -> dict[str, Entry]:
    """The text model's live tensors under its own names, whatever prefix they are stored with.

    Vision tower, output head and multi-token prediction of a multimodal checkpoint, and dead layers, are left out.
    """
    prefixes = [prefix for prefix in TEXT_PREFIXES if f"{prefix}embed_tokens.weight" in stored]
    if len(prefixes) != 1:
        known = ", ".join(f"{prefix}embed_tokens.weight" for prefix in TEXT_PREFIXES)
        raise CheckpointError(
            f"{where} must hold one token embedding and holds {len(prefixes)}; it was looked for as {known}. "
            f"The first tensors are {some(stored)}."
        )
    prefix = prefixes[0]
    dead = tuple(prefix + name for name in dead_prefixes(SimpleNamespace(num_hidden_layers=layers)))
    used = {key: entry for key, entry in stored.items() if not key.startswith(NOT_TEXT + dead)}
    if stray := [key for key in used if not key.startswith(prefix)]:
        raise CheckpointError(
            f"{where} holds its text model under {prefix!r} and {len(stray)} unknown tensors beside it: {some(stray)}. "
            "Download it again."
        )
    return {key.removeprefix(prefix): entry for key, entry in used.items()}


def plain_plan(device: torch.device, dtype: torch.dtype) -> Plan:
    return (("*", Placement(dtype, device)),)


def transformer_plan(device: torch.device, dtype: torch.dtype, stream: bool = False) -> Plan:
    """stream: the blocks stay on the host, from where `engine.offload` brings them."""
    # A quarter of the model's bytes for vectors that a schedule needs once: float32 in its file is where it stays.
    host = Placement(torch.float32, torch.device("cpu"), mapped=True)
    blocks = Placement(dtype, torch.device("cpu"))
    streamed = tuple((f"transformer_blocks.*.{start}*", blocks) for start in STREAMED) if stream else ()
    return ((HOST_PATTERN, host), *streamed, *plain_plan(device, dtype))

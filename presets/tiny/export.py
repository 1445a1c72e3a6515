"""From training files to the checkpoint that ships: `python -m presets.tiny.export TRAINED_FOLDER`.

The result has the folders, names and dtypes of the released PAN2 checkpoint, so that one loader serves both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3_5TextModel

from engine.arguments import in_one_line
from engine.errors import RequestError
from presets.tiny.text import new_tokenizer, text_config
from presets.tiny.train_dit import CONFIG
from presets.tiny.train_vae import load_vae

HERE = Path(__file__).resolve().parent
CHECKPOINT = HERE / "checkpoint"
SHIFT = 20.0
LARGEST_FILE = 15 * 2**20
TRANSFORMER, TEXT = "transformer.", "text.model."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="the folder that training wrote")
    parser.add_argument("target", type=Path, nargs="?", default=CHECKPOINT)
    parser.add_argument("--shift", type=float, default=SHIFT, help="of the sampling schedule")
    options = parser.parse_args()
    with in_one_line():
        if not (options.source / "vae.safetensors").is_file():
            raise RequestError(f"{options.source} holds no vae.safetensors. Give the folder that training wrote.")
        export(options.source, options.target, options.shift)


def export(source: Path, target: Path, shift: float = SHIFT) -> None:
    """Write a whole checkpoint folder from vae.safetensors and student_*.safetensors in `source`."""
    student: dict[str, Tensor] = {}
    for path in sorted(source.glob("student_*.safetensors")):
        student |= load_file(path)
    write_transformer(_part(student, TRANSFORMER), target / "transformer")
    tokenizer = new_tokenizer()
    write_text_encoder(_part(student, TEXT), len(tokenizer), target / "text_encoder")
    tokenizer.save_pretrained(target / "tokenizer")
    write_vae(source / "vae.safetensors", target / "vae")
    write_scheduler(shift, target / "scheduler")


def unpack(checkpoint: Path, folder: Path) -> None:
    """The reverse of `export`: training files to go on from, made from a checkpoint."""
    student: dict[str, Tensor] = {}
    for path in sorted((checkpoint / "transformer").glob("*.safetensors")):
        student |= {TRANSFORMER + name: value for name, value in load_file(path).items()}
    dead = tuple(f"layers.{i}." for i in (2, 3))
    for name, value in load_file(checkpoint / "text_encoder" / "model.safetensors").items():
        if not name.startswith(dead) and name != "norm.weight":
            student[TEXT + name] = value
    folder.mkdir(parents=True, exist_ok=True)
    save_file(student, folder / "student_0.safetensors")
    config = json.loads((checkpoint / "vae" / "config.json").read_text(encoding="utf-8"))
    stats = {f"latents.{key}": torch.tensor(config[f"latents_{key}"]) for key in ("mean", "std")}
    weights = load_file(checkpoint / "vae" / "diffusion_pytorch_model.safetensors")
    save_file(weights | stats, folder / "vae.safetensors")


def _part(student: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in student.items() if name.startswith(prefix)}


def write_transformer(weights: dict[str, Tensor], folder: Path) -> None:
    """bf16, the blocks' modulations float32, in shards with an index."""
    typed = {
        name: value.to(torch.float32 if ".norm1.linear." in name else torch.bfloat16).contiguous()
        for name, value in weights.items()
    }
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in typed.items():
        if _bytes(shards[-1]) + _bytes({name: value}) > LARGEST_FILE:
            shards.append({})
        shards[-1][name] = value
    folder.mkdir(parents=True, exist_ok=True)
    stem = "diffusion_pytorch_model"
    index: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"{stem}-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, folder / name, {"format": "pt"})
        index |= dict.fromkeys(shard, name)
    _write(folder / f"{stem}.safetensors.index.json", {"metadata": {"total_size": _bytes(typed)}, "weight_map": index})
    _write(folder / "config.json", {"_class_name": "PAN2Transformer3DModel", **CONFIG})


def _bytes(tensors: dict[str, Tensor]) -> int:
    return sum(value.numel() * value.itemsize for value in tensors.values())


def write_text_encoder(weights: dict[str, Tensor], vocabulary_size: int, folder: Path) -> None:
    """The whole model in bf16; the two layers after hidden_states[-3] influence nothing and are zero."""
    config = text_config(vocabulary_size)
    with torch.device("meta"):
        shapes = {name: value.shape for name, value in Qwen3_5TextModel(config).state_dict().items()}
    whole = {name: weights.get(name, torch.zeros(shape)).bfloat16().contiguous() for name, shape in shapes.items()}
    if unknown := set(weights) - set(whole):
        raise ValueError(f"the text encoder has no {', '.join(sorted(unknown))}")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(whole, folder / "model.safetensors", {"format": "pt"})
    config.architectures = ["Qwen3_5TextModel"]
    config.save_pretrained(folder)


def write_vae(source: Path, folder: Path) -> None:
    """float16: half the size, and its rounding changes the pictures by less than one level of 255."""
    vae, _, _ = load_vae(source, "cpu")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: value.half().contiguous() for name, value in vae.state_dict().items()}
    save_file(weights, folder / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    vae.save_config(folder)


def write_scheduler(shift: float, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    values = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": shift}
    _write(folder / "scheduler_config.json", values)


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

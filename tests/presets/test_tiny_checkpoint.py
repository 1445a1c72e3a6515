"""The checkpoint that ships: sizes, names and dtypes as released, its tokenizer, and a decoded prompt."""

import json
import re
import threading
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from engine.checkpoint import load_scheduler, load_text_encoder, load_transformer, load_vae
from engine.condition import make_condition
from engine.decode import decode
from engine.denoise import denoise
from engine.noise import draw_noise
from engine.prompt import tokenize
from engine.schedule import build_scheduler
from engine.settings import DecodeSettings
from engine.shapes import latent_shape
from presets.tiny.autoencoder import LATENT_CHANNELS, USED_CHANNELS
from presets.tiny.vocabulary import EXAMPLES, unknown_words

TINY = Path(__file__).resolve().parents[2] / "presets" / "tiny"
CHECKPOINT = TINY / "checkpoint"
MIB = 2**20


def tensors(part):
    """{name: (dtype, shape)} of a part's files."""
    found = {}
    for path in (CHECKPOINT / part).glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a mapping)
                entry = file.get_slice(name)
                found[name] = (entry.get_dtype(), tuple(entry.get_shape()))
    return found


@pytest.fixture(scope="module")
def text():
    return load_text_encoder(CHECKPOINT, "cpu", torch.float32)


@pytest.fixture(scope="module")
def transformer():
    return load_transformer(CHECKPOINT, "cpu", torch.float32)


def test_everything_fits():
    files = [path for path in TINY.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    sizes = [path.stat().st_size for path in files]
    assert sum(sizes) <= 40 * MIB
    assert max(sizes) < 16 * MIB


def test_names_and_dtypes_are_the_releases():
    path = TINY.parents[1] / "tests" / "data" / "release_keys.json"
    entries = json.loads(path.read_text(encoding="utf-8"))["keys"]
    released = {entry["key"]: entry["release_dtype"] for entry in entries}
    kinds = {"F32": "float32", "BF16": "bfloat16"}
    stored = tensors("transformer")
    for name, (dtype, _) in stored.items():
        general = re.sub(r"^(transformer_blocks|context_refiner)\.\d+", r"\1.{i}", name)
        assert kinds[dtype] == released[general], name
    assert {re.sub(r"^(transformer_blocks|context_refiner)\.\d+", r"\1.{i}", name) for name in stored} == set(released)


def test_the_index_lists_every_tensor():
    folder = CHECKPOINT / "transformer"
    index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text(encoding="utf-8"))
    assert set(index["weight_map"]) == set(tensors("transformer"))
    assert {path.name for path in folder.glob("*.safetensors")} == set(index["weight_map"].values())


def test_unused_channels_are_neither_read_nor_written(transformer):
    unread = [*range(USED_CHANNELS, LATENT_CHANNELS), *range(LATENT_CHANNELS + USED_CHANNELS, 2 * LATENT_CHANNELS)]
    assert not transformer.x_embedder.weight[:, unread].any()
    assert not transformer.proj_out.weight.view(LATENT_CHANNELS, 4, -1)[USED_CHANNELS:].any()


def test_the_tokenizer_keeps_known_words_and_marks_others(text):
    tokens = tokenize(text.tokenizer, "A RED circle, moves\tright; dragon")
    words = text.tokenizer.convert_ids_to_tokens(tokens.ids[tokens.start :])
    assert words[:8] == ["a", "red", "circle", ",", "moves", "right", ";", "[UNK]"]
    assert words[8:] == ["<|im_end|>", "\n", "<|im_start|>", "assistant", "\n"]
    known = "a yellow star spins on a checker gray background"
    assert text.tokenizer.decode(text.tokenizer.encode(known)) == known


def test_examples_are_in_its_language():
    for prompt in EXAMPLES:
        assert unknown_words(prompt) == []


def test_the_evaluation_is_of_this_checkpoint():
    result = json.loads((TINY / "evaluation.json").read_text(encoding="utf-8"))
    assert result["sampling"]["shift"] == load_scheduler(CHECKPOINT).config.shift
    assert min(result["accuracy"][key] for key in ("colour", "background", "objects", "solid")) >= 0.9
    assert result["checker"]["true"]["all_three"] >= 0.98
    assert result["checker"]["shuffled"]["all_three"] <= 0.1


@pytest.mark.slow
def test_a_prompt_decides_colour_and_ground(text, transformer):
    """One latent frame (a still) of the default size: the words are visible in its pixels."""
    vae = load_vae(CHECKPOINT, "cpu", torch.float32)
    shape = latent_shape(1, 256, 448)
    means = {}
    for colour in ("red", "blue"):
        embedding = text.encode(f"a {colour} circle stands still on a plain gray background, static camera").embedding
        steps = denoise(
            transformer, embedding, text.encode(" ").embedding, make_condition(shape), draw_noise(1, (1, *shape)),
            build_scheduler(load_scheduler(CHECKPOINT), 6), 2.5, threading.Event(),
        )  # fmt: skip
        *_, last = steps
        (chunk,) = decode(vae, last.latents, DecodeSettings())
        picture = torch.as_tensor(chunk.frames)[0].float()
        means[colour] = picture[112:144, 208:240].mean((0, 1))
        corner = picture[:32, :32].mean((0, 1))
        assert (corner - torch.tensor([100.0, 102.0, 108.0])).abs().max() < 20
    assert means["red"][0] > means["red"][2] + 80
    assert means["blue"][2] > means["blue"][0] + 80

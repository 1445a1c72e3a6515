"""Saved latents: a round trip without loss, and every kind of wrong file refused in words."""

import hashlib

import pytest
import torch
from safetensors.torch import save_file

from engine.errors import RequestError
from engine.latents import folder_hash, load_latents, save_latents

LATENTS = torch.linspace(-3, 3, 48 * 3 * 4 * 6).reshape(1, 48, 3, 4, 6)


def test_round_trip_keeps_every_bit_and_the_notes(tmp_path):
    path = tmp_path / "latents.safetensors"
    digest = save_latents(path, LATENTS.transpose(3, 4).contiguous().transpose(3, 4), {"seed": "7"})
    saved = load_latents(path)
    assert torch.equal(saved.tensor, LATENTS)
    assert saved.metadata == {"seed": "7", "sha256": digest}
    assert digest == hashlib.sha256(LATENTS.numpy().tobytes()).hexdigest()
    assert (saved.frames, saved.size) == (9, (64, 96))
    assert [file.name for file in tmp_path.iterdir()] == ["latents.safetensors"]


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"other": LATENTS}, "other"),
        ({"latents": LATENTS[0]}, "shape"),
        ({"latents": LATENTS[:, :16]}, "48"),
        ({"latents": LATENTS.repeat(2, 1, 1, 1, 1)}, "shape"),
        ({"latents": LATENTS[..., :5].contiguous()}, "even"),
        ({"latents": LATENTS.int()}, "finite"),
        ({"latents": torch.full_like(LATENTS, float("nan"))}, "finite"),
        ({"latents": torch.zeros(1, 48, 0, 4, 6)}, "shape"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(RequestError, match=message):
        load_latents(tmp_path / "bad.safetensors")


def test_files_that_are_no_safetensors_are_refused(tmp_path):
    path = tmp_path / "latents.safetensors"
    with pytest.raises(RequestError, match="does not exist"):
        load_latents(path)
    save_latents(path, LATENTS, {})
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(RequestError, match="not a whole safetensors file"):
        load_latents(path)
    path.write_bytes(b"hello")
    with pytest.raises(RequestError, match="not a whole safetensors file"):
        load_latents(path)


def test_folder_hash_tells_weights_apart(tmp_path):
    save_latents(tmp_path / "a.safetensors", LATENTS, {})
    first = folder_hash(tmp_path)
    assert first == folder_hash(tmp_path)
    save_latents(tmp_path / "a.safetensors", LATENTS + 1, {})
    assert folder_hash(tmp_path) != first

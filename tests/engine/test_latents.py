"""Saved latents: a round trip without loss, and every kind of wrong file refused in words."""

import hashlib
import re
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engine.errors import RequestError, ResourceError
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
        ({"latents": LATENTS.int()}, "stored as torch.int32; needed is float32"),
        ({"latents": LATENTS.to(torch.float8_e4m3fn)}, "stored as torch.float8_e4m3fn; needed is float32"),
        ({"latents": torch.full_like(LATENTS, 1e300, dtype=torch.float64)}, "finite numbers in float32"),
        ({"latents": torch.full_like(LATENTS, float("nan"))}, "finite"),
        ({"latents": torch.zeros(1, 48, 0, 4, 6)}, "shape"),
    ],
)
def test_wrong_tensors_are_refused(tmp_path, tensors, message):
    save_file(tensors, tmp_path / "bad.safetensors")
    with pytest.raises(RequestError, match=message):
        load_latents(tmp_path / "bad.safetensors")


@pytest.mark.parametrize("length", [2**20 + 1, 100_000_000, 2**63, 2**64 - 1])
def test_a_header_that_claims_to_be_huge_is_refused_unread(tmp_path, length):
    path = tmp_path / "bomb.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b"{")
        file.truncate(min(length, 2**30) + 8)
    with pytest.raises(RequestError, match="at most 1048576 are read"):
        load_latents(path)


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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_floating_point_types_are_read_as_float32(tmp_path, dtype):
    save_file({"latents": LATENTS.to(dtype)}, tmp_path / "other.safetensors")
    assert torch.equal(load_latents(tmp_path / "other.safetensors").tensor, LATENTS.to(dtype).float())


def test_a_folder_that_was_deleted_meanwhile_is_made_again(tmp_path):
    path = tmp_path / "outputs" / "job" / "latents.safetensors"
    save_latents(path, LATENTS, {})
    assert torch.equal(load_latents(path).tensor, LATENTS)


@pytest.fixture
def spare(tmp_path, monkeypatch):
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "spare"))
    (tmp_path / "spare").mkdir()
    return tmp_path / "spare"


@pytest.fixture
def full_disk(monkeypatch, spare):
    """Only the folder for temporary files has room."""

    def fill_up(tensors, path, metadata):
        if spare in Path(path).parents:
            return save_file(tensors, path, metadata)
        Path(path).write_bytes(b"half")
        raise SafetensorError("No space left on device (os error 28)")

    monkeypatch.setattr("engine.latents.save_file", fill_up)


@pytest.mark.parametrize("way", ["full disk", "file in the way"])
def test_latents_that_cannot_be_written_are_kept_elsewhere(tmp_path, spare, way, request):
    path = tmp_path / "job" / "latents.safetensors"
    if way == "full disk":
        request.getfixturevalue("full_disk")
    else:
        (tmp_path / "job").write_text("not a folder")
    with pytest.raises(ResourceError, match=re.escape(str(path))) as caught:
        save_latents(path, LATENTS, {"seed": "7"})
    [kept] = spare.rglob("*.*")
    assert f"kept in {kept}" in str(caught.value)
    assert torch.equal(load_latents(kept).tensor, LATENTS) and load_latents(kept).metadata["seed"] == "7"
    assert not list(tmp_path.rglob("*.part"))


def test_latents_that_can_be_written_nowhere_leave_nothing_behind(tmp_path, spare, monkeypatch):
    def fail(tensors, path, metadata):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("engine.latents.save_file", fail)
    with pytest.raises(ResourceError, match="so they are lost"):
        save_latents(tmp_path / "job" / "latents.safetensors", LATENTS, {})
    assert not [path for path in tmp_path.rglob("*") if path.is_file()] and not list(spare.iterdir())


def test_folder_hash_tells_weights_apart(tmp_path):
    save_latents(tmp_path / "a.safetensors", LATENTS, {})
    first = folder_hash(tmp_path)
    assert first == folder_hash(tmp_path)
    save_latents(tmp_path / "a.safetensors", LATENTS + 1, {})
    assert folder_hash(tmp_path) != first

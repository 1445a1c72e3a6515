import io
import json
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from engine import condition as condition_module
from engine.condition import (
    check_picture,
    cover,
    denormalise,
    encode_image,
    latent_stats,
    make_condition,
    normalise,
    open_image,
    prepare_image,
)
from engine.errors import EngineError, RequestError

DATA = Path(__file__).parents[1] / "data"
GEOMETRY = json.loads((DATA / "image_geometry.json").read_text())
STATS = json.loads((DATA / "wan22_latent_stats.json").read_text())


def gradient(width=24, height=16, mode="RGB"):
    """A picture in which every corner has another colour."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 10, y * 15, 255 - x * 5], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels).convert(mode)


def file_of(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    file.seek(0)
    return file


@pytest.mark.parametrize("case", GEOMETRY, ids=lambda case: f"{case['image']}-{case['target']}")
def test_geometry_agrees_with_the_golden_cases(case):
    width, height = case["target"]
    resized, box = cover(tuple(case["image"]), height, width)
    assert list(resized) == case["resized"]
    assert list(box) == case["crop_box"]


@pytest.mark.parametrize("seed", range(3))
def test_the_canvas_is_always_covered(seed):
    numbers = np.random.default_rng(seed)
    for _ in range(500):
        size = tuple(int(n) for n in numbers.integers(1, 3000, 2))
        height, width = (int(n) * 32 for n in numbers.integers(1, 40, 2))
        resized, (left, top, right, bottom) = cover(size, height, width)
        assert min(left, top) >= 0 and right <= resized[0] and bottom <= resized[1]
        assert (right - left, bottom - top) == (width, height)
        assert width == resized[0] or height == resized[1]


@pytest.mark.parametrize("name", ["wide", "tall_up"])
def test_pixels_agree_with_the_golden_ones(name):
    golden = load_file(DATA / f"image_prepare_{name}.safetensors")
    with safe_open(DATA / f"image_prepare_{name}.safetensors", "pt") as file:
        width, height = json.loads(file.metadata()["geometry"])["target"]
    pixels = prepare_image(Image.fromarray(golden["inputs.image"].numpy()), height, width)
    assert pixels.shape == (1, 3, 1, height, width)
    assert pixels.dtype == torch.float32
    torch.testing.assert_close(pixels[:, :, 0], golden["output.pixels"], rtol=0, atol=2e-7)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_pictures_are_read_as_they_were_saved(kind, tmp_path):
    path = tmp_path / "first frame"
    path.write_bytes(file_of(gradient(), kind, **({"lossless": True} if kind == "WEBP" else {})).getvalue())
    for source in (path, str(path), path.open("rb"), Image.open(path)):
        opened = open_image(source)
        assert opened.mode == "RGB"
        assert np.array_equal(opened, gradient())


def test_orientation_is_applied_before_the_size_is_looked_at():
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = open_image(file_of(gradient(24, 16), exif=exif))
    assert upright.size == (16, 24)
    assert np.array_equal(upright, gradient(24, 16).rotate(-90, expand=True))


def test_transparent_parts_are_white_in_every_kind_of_transparency():
    rgba = gradient(mode="RGBA")
    alpha = np.zeros((16, 24), np.uint8)
    alpha[:, 12:], alpha[:, 6:12] = 255, 128
    rgba.putalpha(Image.fromarray(alpha))
    opened = np.asarray(open_image(file_of(rgba)))
    assert (opened[:, :6] == 255).all()
    assert np.array_equal(opened[:, 12:], np.asarray(gradient())[:, 12:])
    half = (np.asarray(gradient(), float)[:, 6:12] + 255) / 2
    assert np.abs(opened[:, 6:12] - half).max() <= 1

    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert np.array_equal(np.asarray(open_image(file_of(palette, transparency=1))), np.full((4, 4, 3), 255))
    assert np.asarray(open_image(file_of(Image.new("LA", (4, 4), (7, 0))))).min() == 255


def test_grey_with_16_bits_keeps_its_brightness():
    ramp = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    opened = np.asarray(open_image(file_of(Image.fromarray(ramp))))
    assert np.array_equal(opened[..., 0].ravel(), np.arange(256))
    assert (opened[..., 0] == opened[..., 2]).all()


def test_photos_with_a_preview_as_second_picture_are_taken():
    file = file_of(gradient(), "MPO", save_all=True, append_images=[gradient(8, 8)])
    assert open_image(file).size == (24, 16)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_animations_are_refused(kind):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    with pytest.raises(RequestError, match="holds 3 frames"):
        open_image(file_of(frames[0], kind, save_all=True, append_images=frames[1:]))


def test_broken_files_are_refused(tmp_path):
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        whole = file_of(gradient(240, 160), kind).getvalue()
        with pytest.raises(RequestError, match=r"can't be read|none of"):
            open_image(io.BytesIO(whole[: len(whole) // 2]))
    for content in (b"", b"no picture", b"%!PS-Adobe-3.0 EPSF-3.0\n"):
        with pytest.raises(RequestError, match="is none of JPEG"):
            open_image(io.BytesIO(content))
    with pytest.raises(RequestError, match="does not exist"):
        open_image(tmp_path / "missing.png")
    with pytest.raises(RequestError, match="can't be read"):
        open_image(tmp_path)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_file_with_flipped_bytes_is_read_or_refused_but_nothing_else():
    numbers = np.random.default_rng(0)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP"):
        whole = bytearray(file_of(gradient(), kind).getvalue())
        for _ in range(40):
            damaged = bytearray(whole)
            for position in numbers.integers(4, len(whole), 3):
                damaged[position] = int(numbers.integers(256))
            try:
                assert open_image(io.BytesIO(damaged)).mode == "RGB"
            except RequestError as error:
                assert "picture" in str(error)


def test_pictures_without_pixels_and_huge_ones_are_refused(monkeypatch):
    with pytest.raises(RequestError, match="0 x 5 and so has no pixels"):
        open_image(Image.new("RGB", (0, 5)))
    monkeypatch.setattr(condition_module, "MAX_PIXELS", 24 * 16)
    assert open_image(file_of(gradient(24, 16))).size == (24, 16)
    with pytest.raises(RequestError, match="25 x 16; at most 384 pixels"):
        open_image(file_of(gradient(25, 16)))


def test_the_pixel_limit_is_checked_before_anything_is_decoded():
    bomb = bytearray(file_of(Image.new("1", (8, 8))).getvalue())
    bomb[16:24] = (60_000).to_bytes(4, "big") * 2
    bomb[29:33] = zlib.crc32(bomb[12:29]).to_bytes(4, "big")
    with pytest.raises(RequestError, match="more than 80000000 pixels"):
        open_image(io.BytesIO(bomb))


def test_a_picture_too_narrow_for_the_canvas_is_refused(monkeypatch):
    monkeypatch.setattr(condition_module, "MAX_PIXELS", 32 * 64 * 10)
    assert prepare_image(Image.new("RGB", (20, 1)), 32, 64).shape[-1] == 64
    with pytest.raises(RequestError, match="21 x 1, too narrow for a video of 64 x 32"):
        prepare_image(Image.new("RGB", (21, 1)), 32, 64)
    check_picture(Image.new("RGB", (20, 1)), 32, 64)
    with pytest.raises(RequestError, match="21 x 1, too narrow for a video of 64 x 32"):
        check_picture(Image.new("RGB", (21, 1)), 32, 64)


def test_floating_point_pixels_are_refused():
    with pytest.raises(RequestError, match="floating-point"):
        open_image(Image.new("F", (4, 4)))


def test_normalise_and_denormalise_take_the_vaes_own_statistics():
    mean, std = latent_stats(STATS)
    assert mean.shape == std.shape == (1, 48, 1, 1, 1)
    assert mean[0, :, 0, 0, 0].tolist() == pytest.approx(STATS["latents_mean"])
    raw = mean + 2 * std
    torch.testing.assert_close(normalise(raw, STATS), torch.full_like(raw, 2.0), rtol=0, atol=2e-6)
    torch.testing.assert_close(denormalise(normalise(raw, STATS), STATS), raw)
    assert normalise(raw.bfloat16(), STATS).dtype == torch.float32


@pytest.fixture(scope="module")
def vae():
    """The Wan 2.2 layout, very narrow, all random."""
    torch.manual_seed(3)
    return AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=4,
        z_dim=48,
        num_res_blocks=1,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        latents_mean=STATS["latents_mean"],
        latents_std=STATS["latents_std"],
    ).eval()


def test_the_first_frame_is_the_mode_of_the_posterior_normalised(vae):
    pixels = prepare_image(gradient(), 32, 64)
    latents = encode_image(vae, pixels)
    assert latents.shape == (1, 48, 1, 2, 4)
    assert latents.dtype == torch.float32
    assert not latents.requires_grad
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
    mean, std = latent_stats(STATS)
    assert posterior.std.min() > 0.1
    torch.testing.assert_close(latents, (posterior.mean - mean) / std)
    assert torch.equal(encode_image(vae, pixels), latents)


def test_a_vae_whose_values_are_not_finite_is_named(vae):
    with pytest.raises(EngineError, match=r"VAE's encoder .*float32"):
        encode_image(vae, torch.full((1, 3, 1, 32, 32), float("nan")))


def test_condition_without_a_picture_is_zero():
    condition = make_condition((48, 3, 4, 6))
    assert condition.shape == (1, 49, 3, 4, 6)
    assert condition.dtype == torch.float32
    assert not condition.any()


def test_condition_holds_the_picture_in_frame_0_and_marks_it():
    latents = torch.randn(1, 48, 1, 4, 6)
    condition = make_condition((48, 3, 4, 6), latents)
    assert torch.equal(condition[:, :48, :1], latents)
    assert (condition[:, 48, 0] == 1).all()
    assert not condition[:, :, 1:].any()
    with pytest.raises(ValueError, match="expected"):
        make_condition((48, 3, 4, 8), latents)
    with pytest.raises(ValueError, match="expected"):
        make_condition((48, 3, 4, 6), torch.zeros(1, 48, 2, 4, 6))

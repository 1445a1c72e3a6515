"""First frame to condition: open a picture, fit it to the canvas, encode it, place it where the model looks for it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from engine.errors import EngineError, RequestError

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "AVIF")
MAX_PIXELS = 80_000_000
MAX_BYTES = 128 * 2**20
_ADVICE = "Give a still picture as PNG, JPEG or WebP."


def open_image(source: str | Path | BinaryIO | Image.Image) -> Image.Image:
    """A picture as people see it: upright (EXIF orientation applied), RGB, transparent parts on white, fully decoded.

    source: path, open binary file or PIL image. Raises RequestError if it is missing, broken, animated, of another kind
    than `FORMATS`, without pixels or larger than `MAX_PIXELS`.
    """
    if isinstance(source, Image.Image):
        return _read(lambda: nullcontext(source), "The picture")
    Image.init()
    if isinstance(source, (str, Path)) and os.path.isfile(source) and os.path.getsize(source) > MAX_BYTES:
        raise RequestError(f"The picture {source} has more than {MAX_BYTES // 2**20} MiB. {_ADVICE}")
    # Named, because Pillow would also try kinds that run other programs (EPS); AVIF is not in every Pillow.
    formats = [kind for kind in FORMATS if kind in Image.OPEN]
    name = f"The picture {source}" if isinstance(source, (str, Path)) else "The picture"
    return _read(lambda: Image.open(source, formats=formats), name)


def _read(opened: Callable[[], AbstractContextManager[Image.Image]], name: str) -> Image.Image:
    """Open and decode, with everything that can go wrong in words."""
    try:
        with opened() as image:
            _check_kind(image, name)
            return to_rgb(ImageOps.exif_transpose(image))
    except RequestError:
        raise
    except UnidentifiedImageError as error:
        raise RequestError(f"{name} is none of {', '.join(FORMATS)}, or broken. {_ADVICE}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(f"{name} has more than {MAX_PIXELS} pixels. Make it smaller first.") from error
    except FileNotFoundError as error:
        raise RequestError(f"{name} does not exist. Check the path.") from error
    except Exception as error:
        # Pillow raises whatever the broken bytes lead to: struct.error, SyntaxError, EOFError, ...
        raise RequestError(f"{name} can't be read ({error}). Save it again, or give another one.") from error


def _check_kind(image: Image.Image, name: str) -> None:
    width, height = image.size
    if not width or not height:
        raise RequestError(f"{name} is {width} x {height} and so has no pixels. {_ADVICE}")
    if width * height > MAX_PIXELS:
        raise RequestError(f"{name} is {width} x {height}; at most {MAX_PIXELS} pixels are taken. Make it smaller.")
    # Phones store a preview as a second picture in a JPEG (kind MPO); that is no animation.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise RequestError(f"{name} holds {frames} frames or pages and one is needed. {_ADVICE}")


def to_rgb(image: Image.Image) -> Image.Image:
    """The picture in RGB: 16-bit grey in 8 bits, transparent parts on white. Raises RequestError for float pixels."""
    if image.mode == "F":
        raise RequestError(f"The picture has floating-point pixels, whose range is unknown. {_ADVICE}")
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.float32), 0, 65535) / 257
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def cover(size: tuple[int, int], height: int, width: int) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    """How a picture of `size` (width, height) covers a canvas: its new (width, height) and the centred crop box in it.

    Both roundings are Python's, halves to even. Box: left, top, right, bottom.
    """
    scale = max(width / size[0], height / size[1])
    new_width, new_height = round(size[0] * scale), round(size[1] * scale)
    left, top = round((new_width - width) / 2), round((new_height - height) / 2)
    return (new_width, new_height), (left, top, left + width, top + height)


def check_picture(image: Image.Image, height: int, width: int) -> None:
    """Raises RequestError for a picture so narrow that it would have to be enlarged beyond `MAX_PIXELS` to cover the
    canvas. Needs only its size, so that it can be said before any work."""
    resized, _ = cover(image.size, height, width)
    if resized[0] * resized[1] > MAX_PIXELS:
        raise RequestError(
            f"The picture is {image.width} x {image.height}, too narrow for a video of {width} x {height} "
            "(width x height). Crop it to a shape nearer to the video's."
        )


def prepare_image(image: Image.Image, height: int, width: int) -> torch.Tensor:
    """A picture scaled to cover the canvas (Lanczos) and cropped at its centre.

    image: as from `open_image`. Result: float32 [1, 3, 1, height, width] in [-1, 1]. Raises RequestError as
    `check_picture` does.
    """
    check_picture(image, height, width)
    resized, box = cover(image.size, height, width)
    cropped = to_rgb(image).resize(resized, Image.Resampling.LANCZOS).crop(box)
    pixels = torch.from_numpy(np.array(cropped)).permute(2, 0, 1)
    return (pixels.float() / 127.5 - 1.0)[None, :, None]


def latent_stats(vae_config: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and deviation of the VAE's latents, float32 [1, C, 1, 1, 1] each, from its configuration."""
    mean, std = (torch.tensor(vae_config[key], dtype=torch.float32) for key in ("latents_mean", "latents_std"))
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


def normalise(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """The VAE's latents [B, C, F, h, w] in the transformer's scale, float32."""
    mean, std = (stat.to(latents.device) for stat in latent_stats(vae_config))
    return (latents.float() - mean) / std


def denormalise(latents: torch.Tensor, vae_config: Mapping[str, Any]) -> torch.Tensor:
    """The inverse of `normalise`: what the VAE decodes, float32."""
    mean, std = (stat.to(latents.device) for stat in latent_stats(vae_config))
    return latents.float() * std + mean


@torch.no_grad()
def encode_image(vae: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Normalised latents of a first frame, float32 [1, 48, 1, h, w] on the VAE's device.

    vae: diffusers' `AutoencoderKLWan`; pixels: [1, 3, 1, H, W] in [-1, 1]. Takes the mode of the posterior, so that the
    same picture always gives the same latents. Raises EngineError if the result is not finite.
    """
    weight = next(vae.encoder.parameters())
    posterior = vae.encode(pixels.to(weight.device, weight.dtype)).latent_dist
    latents = normalise(posterior.mode(), vae.config)
    if not torch.isfinite(latents).all():
        raise EngineError(
            f"The VAE's encoder ({weight.dtype}) gave values that are not finite for the first frame. "
            "Load the VAE in fp32."
        )
    return latents


def make_condition(latent_shape: Sequence[int], image_latents: torch.Tensor | None = None) -> torch.Tensor:
    """What the transformer knows of the video beforehand: float32 [1, C + 1, F, h, w], latents and then the mask.

    latent_shape: (C, F, h, w). All zero without a picture; with one ([1, C, 1, h, w], normalised) latent frame 0 holds
    it and its mask is 1. Lives on the picture's device.
    """
    channels, frames, height, width = latent_shape
    device = None if image_latents is None else image_latents.device
    condition = torch.zeros(1, channels + 1, frames, height, width, device=device)
    if image_latents is None:
        return condition
    if tuple(image_latents.shape) != (1, channels, 1, height, width):
        raise ValueError(
            f"the first frame's latents are {tuple(image_latents.shape)}, expected {(1, channels, 1, height, width)}"
        )
    condition[:, :channels, :1] = image_latents
    condition[:, channels, 0] = 1.0
    return condition

"""python -m kernels.vae_decode.bench: this decoder and diffusers' own, in one run: seconds, memory, distance from fp32.

Prints a table for each length of video and a JSON line behind it, at once, so that a run that is cut short keeps what
it has. Peers decode the whole video in one call; theirs ends when the frames are on the device, ours when the last
uint8 frame is on the host. Quality is that of the first --truth frames (a decoder that only looks back gives the same
ones in a longer video), on float frames, against strict fp32.
A peak holds a decoder's own weights; the fp32 module that ours are prepared from is subtracted.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from engine.arguments import amount, positive, require_folder
from engine.compare import FLOAT_RANGE, psnr, ssim
from engine.decode import decode, explain, float_frames
from engine.decode_paths import forget
from engine.errors import EngineError, RequestError
from engine.settings import DecodeSettings
from kernels.vae_decode import bench_setup as setup
from kernels.vae_decode import bench_stages

PEERS = ("diffusers-fp32", "diffusers-bf16", "diffusers-bf16-cl", "diffusers-fp16")
OURS = tuple(f"ours-{path}-{precision}" for path in ("plain", "portable", "built") for precision in ("bf16", "fp16"))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}  # by dimensions of a weight
WARM_LATENTS = 9  # of a warm-up: every shape of a long video
EARLY = 17  # frames that somebody waits for first


@dataclass
class Row:
    """One decoder. seconds: median; peak_gib: with its weights; psnr, ssim: on float frames; frames17_s: until the
    first 17 frames were there."""

    name: str
    seconds: float
    peak_gib: float | None
    psnr: float
    ssim: float
    frames17_s: float


def parser() -> argparse.ArgumentParser:
    """The arguments."""
    found = argparse.ArgumentParser("python -m kernels.vae_decode.bench", description=__doc__.split("\n")[0])
    found.add_argument("--frames", default="121", help="lengths with commas, each 4n + 1 (default: 121)")
    found.add_argument("--height", type=int, default=704)
    found.add_argument("--width", type=int, default=1248)
    found.add_argument("--weights", type=Path, help="a VAE's folder (default: random weights by the recipe)")
    found.add_argument("--truth", type=positive, default=17, help="frames compared with strict fp32 (default: 17)")
    found.add_argument("--repeat", type=positive, default=3, help="timed runs of each decoder (default: 3)")
    found.add_argument("--only", help="names of rows, with commas")
    found.add_argument("--memory-gib", type=amount, help="the most that our decoders may take")
    found.add_argument("--stages", action="store_true", help="time each part of our decoder")
    found.add_argument("--profile", action="store_true", help="list the kernels that take longest")
    found.add_argument("--layers", action="store_true", help="time each way of each layer, and print the table's rows")
    found.add_argument("--out", type=Path, help="a folder for the JSON lines and the table")
    found.add_argument("--small", action="store_true", help="a tiny VAE and size, to try the bench itself on a CPU")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0, or 2 where something can't be done, said in words."""
    given = parser().parse_args(arguments)
    if given.small:
        given.height, given.width, given.frames, given.truth, given.repeat = 32, 48, "9", 5, 1
    try:
        if given.out:
            require_folder("--out", given.out)
        with torch.no_grad():
            for line in run(given):
                print(line, flush=True)
    except EngineError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _lengths(given: argparse.Namespace) -> list[int]:
    """Frames of each video. Raises RequestError for a size that no decoder takes, and for a name that none has."""
    lengths = [int(part) if part.strip().isdecimal() else 0 for part in given.frames.split(",")]
    if any(frames % 4 != 1 for frames in lengths) or min(given.height, given.width) < 16:
        raise RequestError(f"--frames {given.frames} must be 4n + 1, --height and --width at least 16.")
    if given.height % 16 or given.width % 16:
        raise RequestError(f"{given.width} x {given.height}: height and width must be multiples of 16.")
    if given.weights and not (given.weights / "config.json").is_file():
        raise RequestError(f"--weights {given.weights} holds no config.json. Give the folder of a VAE.")
    names(given.only)
    return lengths


def run(given: argparse.Namespace) -> Iterator[str]:
    """The whole bench, line by line."""
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    if given.layers:
        from kernels.vae_decode.bench_layers import run as layers

        yield from layers(device, given.small, given.out)
        return
    lengths = _lengths(given)
    vae, latents = setup.load_vae(given.weights, given.small, max(*lengths, given.truth), given.height, given.width)
    rate = setup.matmul_rate(device, 256 if given.small else 8192, 0.1 if given.small else 1.0)
    yield f"{setup.gpu_name(device)}, torch {torch.__version__}: matrix product {rate:.0f} TFLOP/s"
    truth = strict(vae, latents[:, :, : (given.truth + 3) // 4], device)
    lines = []
    for frames in lengths:
        rows = []
        for name in names(given.only):
            row = measure(name, vae, latents[:, :, : (frames + 3) // 4], truth, device, given)
            yield f"{name:22s} {row}" if isinstance(row, str) else show(row)
            rows += [] if isinstance(row, str) else [row]
        lines.append(summary(given, device, frames, rate, rows))
        yield lines[-1]
        if given.out:
            (given.out / "vae_decode.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    yield from extras(vae, latents, device, given)


def names(only: str | None) -> list[str]:
    """The rows to measure."""
    known = [*PEERS, *OURS]
    if only is None:
        return known
    unknown = set(only.split(",")) - set(known)
    if unknown:
        raise EngineError(f"--only {only}: there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}.")
    return only.split(",")


def strict(vae: nn.Module, latents: Tensor, device: torch.device) -> Tensor:
    """The truth on the host: diffusers in fp32 without TF32, [t, 3, H, W] in [-1, 1]."""
    settings = DecodeSettings(path="reference", precision="fp32")
    frames = [part.cpu() for part in float_frames(vae.to(device), latents, settings)]
    vae.cpu()
    return torch.cat(frames)


def measure(
    name: str, vae: nn.Module, latents: Tensor, truth: Tensor, device: torch.device, given: argparse.Namespace
) -> Row | str:
    """A row, or why there is none."""
    maker = peer if name in PEERS else ours
    setup.peak_reset(device)
    try:
        return maker(name, vae, latents, truth, device, given)
    except EngineError as error:
        return f"not here: {error}"
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        forget(vae)
        vae.cpu()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def peer(
    name: str, vae: nn.Module, latents: Tensor, truth: Tensor, device: torch.device, given: argparse.Namespace
) -> Row:
    """diffusers' decode of the whole video in one call."""
    dtype = DTYPES[name.split("-")[1]]
    module, z = copy.deepcopy(vae).to(device, dtype), latents.to(device, dtype)
    cudnn, before = torch.backends.cudnn, (torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32)
    cudnn.allow_tf32 = True
    if name.endswith("-cl"):
        cudnn.benchmark = True
        for parameter in module.parameters():
            if parameter.ndim in FORMATS:
                parameter.data = parameter.data.contiguous(memory_format=FORMATS[parameter.ndim])
    try:
        return _peer(name, module, z, truth, device, given)
    finally:
        cudnn.benchmark, cudnn.allow_tf32 = before


def _peer(
    name: str, module: nn.Module, z: Tensor, truth: Tensor, device: torch.device, given: argparse.Namespace
) -> Row:
    module.decode(z[:, :, :3])
    setup.peak_reset(device)
    seconds = statistics.median(setup.timed(lambda: module.decode(z), device) for _ in range(given.repeat))
    peak = setup.peak_gib(device)
    first = module.decode(z[:, :, : (given.truth + 3) // 4]).sample[0].transpose(0, 1).float().clamp(-1, 1).cpu()
    return Row(name, seconds, peak, *quality(first, truth), seconds)


def ours(
    name: str, vae: nn.Module, latents: Tensor, truth: Tensor, device: torch.device, given: argparse.Namespace
) -> Row:
    """Our decode as the engine runs it, frames on the host."""
    _, path, precision = name.split("-")
    settings = DecodeSettings(path, precision, memory_gib=given.memory_gib)  # type: ignore[arg-type]
    explain(settings, device, vae)
    vae.to(device)
    weights = sum(p.nbytes for p in vae.parameters()) / 2**30 if device.type == "cuda" else 0.0
    run = deliver(vae, latents, settings)
    deliver(vae, latents[:, :, :WARM_LATENTS], settings)()
    setup.peak_reset(device)
    runs = [run() for _ in range(given.repeat)]
    peak = setup.peak_gib(device)
    first = torch.cat([part.cpu() for part in float_frames(vae, latents[:, :, : (given.truth + 3) // 4], settings)])
    seconds, early = (statistics.median(column) for column in zip(*runs, strict=True))
    return Row(name, seconds, None if peak is None else peak - weights, *quality(first, truth), early)


def deliver(vae: nn.Module, latents: Tensor, settings: DecodeSettings) -> Callable[[], tuple[float, float]]:
    """A run that returns the seconds until all frames and until the first 17 were on the host."""

    def run() -> tuple[float, float]:
        began, early = time.perf_counter(), None
        for chunk in decode(vae, latents, settings):
            if chunk.stats.path != settings.path or chunk.stats.precision != settings.precision or chunk.stats.notes:
                raise EngineError(f"it fell back: {'; '.join(chunk.stats.notes)}")
            if early is None and chunk.start + len(chunk.frames) >= EARLY:
                early = time.perf_counter() - began
        total = time.perf_counter() - began
        return total, total if early is None else early

    return run


def quality(frames: Tensor, truth: Tensor) -> tuple[float, float]:
    """PSNR of all frames together and the mean SSIM, over [-1, 1]. Frames that are not finite are infinitely far."""
    frames, truth = frames[: len(truth)], truth[: len(frames)]
    mse = float((frames.double() - truth.double()).square().mean())
    if not math.isfinite(mse):
        return -math.inf, 0.0
    with ThreadPoolExecutor(8) as pool:
        values = list(pool.map(lambda pair: ssim(*pair), zip(frames.numpy(), truth.numpy(), strict=True)))
    return psnr(mse, FLOAT_RANGE), statistics.fmean(values)


def show(row: Row) -> str:
    """A line of the table."""
    peak = "      -" if row.peak_gib is None else f"{row.peak_gib:7.2f}"
    return (
        f"{row.name:22s} {row.seconds:8.3f} s {peak} GiB {row.psnr:7.2f} dB  SSIM {row.ssim:.5f}  "
        f"17 frames {row.frames17_s:.3f} s"
    )


def summary(given: argparse.Namespace, device: torch.device, frames: int, rate: float, rows: list[Row]) -> str:
    """The JSON line. Infinite values as text, which JSON has none of."""
    channels, blocks = (((32, 32), (32, 32), (32, 16), (16, 8)), 2) if given.small else (setup.CHANNELS, 3)
    flops = setup.direct_flops(frames, given.height, given.width, channels, blocks)
    facts: dict[str, Any] = {
        "bench": "vae_decode",
        "gpu": setup.gpu_name(device),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": setup.commit(),
        "frames": frames,
        "height": given.height,
        "width": given.width,
        "matmul_tflops": rate,
        "direct_limit_s": flops / (rate * 1e12),
        "truth_frames": given.truth,
        "rows": [{key: _plain(value) for key, value in asdict(row).items()} for row in rows],
    }
    return json.dumps(facts)


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def extras(vae: nn.Module, latents: Tensor, device: torch.device, given: argparse.Namespace) -> Iterator[str]:
    """Stages and kernels of our decoders, where they were asked for."""
    for name in names(given.only):
        if (given.stages or given.profile) and name in OURS and "plain" not in name:
            _, path, precision = name.split("-")
            settings = DecodeSettings(path, precision, memory_gib=given.memory_gib)  # type: ignore[arg-type]
            try:
                yield from bench_stages.run(name, vae, latents, settings, device, given.profile)
            except EngineError as error:
                yield f"{name}: not here: {error}"


if __name__ == "__main__":
    sys.exit(main())

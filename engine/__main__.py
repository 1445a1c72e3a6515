"""The command line: `python -m engine "a red circle moves right" --out out.mp4`; its commands compare and decode."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

from engine import broken, compare_cli
from engine.arguments import BAD_INPUT, FAILED, require_folder, tell
from engine.devices import RULE, devices_from_environment
from engine.engine import Engine
from engine.errors import Cancelled, EngineError, MediaError, RequestError
from engine.events import (
    Event,
    FramesMeasured,
    FramesReady,
    SideStarted,
    StageEnded,
    StageStarted,
    StepDone,
    VideoFinished,
    Warned,
)
from engine.preset import Preset, preset_from_environment, preset_names
from engine.request import Request, frames_for
from engine.settings import (
    Attention,
    AutoSwitch,
    DecodePath,
    DecodeSettings,
    DenoiseSettings,
    Offload,
    Precision,
    Quality,
)
from engine.survey import survey

STOPPED = 130

KEPT = ("latents.safetensors", "video.mp4", "request.json")  # what a second video would take the place of


def parser() -> argparse.ArgumentParser:
    """The arguments; what is left out comes from the preset."""
    parser = argparse.ArgumentParser(
        "python -m engine",
        description="Make a video of a prompt.",
        epilog='Other commands: "python -m engine compare --help" and "python -m engine decode --help". A video of '
        "such a word alone: python -m engine -- compare",
    )
    parser.add_argument(
        "prompt", nargs="?", default="", help="what the video shows, what happens when, how the camera moves"
    )
    _add_model(parser)
    video = parser.add_argument_group("video")
    video.add_argument("--negative", metavar="TEXT", help="what the video should not show")
    video.add_argument("--image", type=Path, metavar="FILE", help="the first frame")
    length = video.add_mutually_exclusive_group()
    length.add_argument("--seconds", type=float, help="its length, taken to the nearest 4n + 1 frames")
    length.add_argument("--frames", type=int, help="its length in frames, 4n + 1")
    video.add_argument("--height", type=int, metavar="PIXELS", help="a multiple of 32")
    video.add_argument("--width", type=int, metavar="PIXELS", help="a multiple of 32")
    video.add_argument("--seed", type=int, help="-1 draws one")
    video.add_argument("--steps", type=int)
    video.add_argument("--guidance", type=float)
    video.add_argument("--shift", type=float)
    how = _add_how(parser)
    how.add_argument("--precision", help=f"of the transformer: {', '.join(get_args(Precision))}")
    how.add_argument("--offload", help=f"of the transformer's blocks to the host: {', '.join(get_args(Offload))}")
    how.add_argument("--plan", action="store_true", help="print where everything would go, load nothing, and exit")
    how.add_argument("--quality", help=f"of the denoising: {', '.join(get_args(Quality))} (faster)")
    how.add_argument("--attention", help=f"of the transformer: {', '.join(get_args(Attention))}")
    how.add_argument("--fused-kernels", help=", ".join(get_args(AutoSwitch)))
    return parser


def decode_parser() -> argparse.ArgumentParser:
    """The arguments of `python -m engine decode`."""
    parser = argparse.ArgumentParser("python -m engine decode", description="Decode saved latents again.")
    parser.add_argument("--latents", type=Path, required=True, metavar="FILE", help="latents.safetensors of a job")
    _add_model(parser)
    _add_how(parser).add_argument(
        "--verify", action="store_true", help="decode on one device as well and say whether every byte is the same"
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("out.mp4"), help="the mp4 to write (default: out.mp4)")
    model = parser.add_argument_group("model")
    model.add_argument("--preset", help=f"{', '.join(preset_names())}, or a .toml file")
    model.add_argument("--checkpoint", help="a checkpoint folder, or a repository on the Hub")
    model.add_argument("--devices", default=devices_from_environment(), help=f"{RULE} (ENGINE_DEVICES)")


def _add_how(parser: argparse.ArgumentParser) -> Any:
    how = parser.add_argument_group("how")
    how.add_argument("--decode-path", help=", ".join(get_args(DecodePath)))
    how.add_argument("--decode-precision", help="auto, fp32, bf16, fp16")
    how.add_argument(
        "--memory-gib", type=float, metavar="GIB", help="the most that decode paths built and portable may take"
    )
    how.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the latents and all other files of the job here")
    how.add_argument("--json", action="store_true", help="print the figures as one JSON line on standard output")
    return how


def make_request(arguments: argparse.Namespace, preset: Preset) -> Request:
    """The checked request that the arguments ask for."""
    frames = arguments.frames
    if arguments.seconds is not None:
        frames = frames_for(arguments.seconds, preset.fps, preset.limits)
    return preset.request(
        prompt=arguments.prompt,
        negative_prompt=arguments.negative,
        image=arguments.image,
        frames=frames,
        height=arguments.height,
        width=arguments.width,
        seed=arguments.seed,
        steps=arguments.steps,
        guidance=arguments.guidance,
        shift=arguments.shift,
        denoise=denoise_settings(arguments, preset),
        decode=decode_settings(arguments),
    )


def denoise_settings(arguments: argparse.Namespace, preset: Preset) -> DenoiseSettings:
    """How to denoise: the preset's settings but for what the arguments say, and without pictures on the way."""
    given = {
        name: getattr(arguments, name) for name in ("precision", "quality", "offload", "attention", "fused_kernels")
    }
    given = {name: value for name, value in given.items() if value}
    return dataclasses.replace(preset.denoise, preview="off", **given)


def decode_settings(arguments: argparse.Namespace) -> DecodeSettings:
    """How to decode, from the arguments."""
    given = {"path": arguments.decode_path, "precision": arguments.decode_precision}
    given = {key: value for key, value in given.items() if value}
    if arguments.memory_gib is not None:
        given["memory_gib"] = arguments.memory_gib
    return DecodeSettings.from_dict(given)


def check_out(out: Path, keep: Path | None) -> None:
    """Refuse an output or a folder that can't be written, before any work."""
    if out.suffix.lower() != ".mp4":
        raise RequestError(f"--out {out} must end in .mp4.")
    if keep:
        require_folder("--keep", keep)
        if there := [name for name in KEPT if (keep / name).exists()]:
            raise RequestError(f"--keep {keep} holds {there[0]} of another video already. Choose a folder without one.")
    name, place = f"--out {out}", out.absolute().parent
    try:
        if out.is_dir() or not place.is_dir():
            raise RequestError(f"{name} can't be written: its folder must exist and it must not be one itself.")
        tempfile.TemporaryFile(dir=place).close()
    except OSError as error:
        raise RequestError(f"{name} can't be written ({error.strerror}). Choose another place.") from error


class Progress:
    """One bar a stage on standard error."""

    def __init__(self) -> None:
        self.bar: tqdm | None = None

    def show(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case StageStarted(stage, total):
                # A stage that can't be counted has only its seconds to show, once it has ended.
                count = {} if total else {"bar_format": "{desc}:"}
                unit = "step" if stage == "denoise" else "frame"
                self.bar = tqdm(total=total, desc=f"{stage:8}", unit=unit, **count)
            case SideStarted(side, path, precision, reason):
                tqdm.write(f"Side {side.upper()}: {path}, {precision} ({reason})", file=sys.stderr)
            case StepDone():
                self.bar.update()
            case FramesMeasured(done):
                self.bar.update(done - self.bar.n)
            case FramesReady(_, frames):
                self.bar.update(len(frames))
            case StageEnded(_, seconds):
                if self.bar.total:
                    self.bar.set_postfix_str(f"{seconds:.1f} s")
                else:
                    self.bar.bar_format = f"{{desc}}: {seconds:.1f} s"
                self.bar.close()
            case Warned(text):
                tqdm.write(f"Warning: {text}", file=sys.stderr)


def run(events: Iterator[Event]) -> VideoFinished:
    """Show events as they come; returns the last one."""
    progress = Progress()
    try:
        for event in events:
            progress.show(event)
    finally:
        if progress.bar is not None:
            progress.bar.close()
    assert isinstance(event, VideoFinished)
    return event


def plan(arguments: argparse.Namespace) -> str:
    """Where everything would go on this machine for what the arguments ask for. Refuses what the work would; a plan
    needs no prompt."""
    preset = preset_from_environment(arguments.preset, arguments.checkpoint)
    request = make_request(arguments, preset)
    engine = Engine(preset, arguments.devices)
    with closing(engine):
        engine.check(dataclasses.replace(request, prompt=request.prompt or "-"))
        decoder = engine.executor.explain_decode(request.decode)
    lines = survey(preset.checkpoint, request, engine.executor.devices, decoder)
    return json.dumps(lines) if arguments.json else "\n".join(f"{k}: {v}" for k, v in lines.items())


def generate(arguments: argparse.Namespace, cancel: threading.Event) -> dict:
    """Make a video of a prompt; returns the figures."""
    check_out(arguments.out, arguments.keep)
    preset = preset_from_environment(arguments.preset, arguments.checkpoint)
    request = make_request(arguments, preset)
    engine = Engine(preset, arguments.devices)
    engine.check(request)
    engine.load(request.denoise)
    estimate = engine.estimate(request)
    print(
        f"{preset.title}: {request.frames} frames of {request.width} x {request.height} (width x height), "
        f"seed {request.seed}{f', about {estimate.total:.0f} s' if estimate else ''}",
        file=sys.stderr,
    )
    return deliver(arguments, lambda folder: engine.generate(request, folder, cancel))


def decode(arguments: argparse.Namespace, cancel: threading.Event) -> dict:
    """Decode saved latents; returns the figures."""
    check_out(arguments.out, arguments.keep)
    engine = Engine(preset_from_environment(arguments.preset, arguments.checkpoint), arguments.devices)
    settings = decode_settings(arguments)
    figures = deliver(arguments, lambda folder: engine.decode(arguments.latents, settings, folder, cancel))
    return figures | {"verdict": verify(engine, arguments.latents, settings, cancel)} if arguments.verify else figures


def verify(engine: Engine, latents: Path, settings: DecodeSettings, cancel: threading.Event) -> dict:
    """Compare a decode with that of one device. Raises EngineError, in words, if they differ more than they may."""
    alone = dataclasses.replace(settings, devices="one")
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress()
        for event in engine.compare(latents, settings, alone, Path(folder), cancel):
            progress.show(event)
    verdict = event.result["verdict"]
    if not (verdict and verdict["passed"]):
        raise EngineError(f"The devices together do not give the frames of one: {verdict and verdict['text']}")
    print(f"{verdict['text']}", file=sys.stderr)
    return verdict


def deliver(arguments: argparse.Namespace, work: Callable[[Path], Iterator[Event]]) -> dict:
    """Do the work in the job's folder and bring the video to where it was asked for."""
    with job_folder(arguments) as folder:
        finished = run(work(folder))
        bring(finished.path, arguments.out)
    print(f"{arguments.out}{' (stopped early)' if finished.partial else ''}", file=sys.stderr)
    return finished.stats | {"video": str(arguments.out), "partial": finished.partial}


def bring(video: Path, out: Path) -> None:
    """Copy the video under a temporary name, then rename, so that an older file is replaced whole or not at all."""
    if out.exists() and out.samefile(video):
        return
    part = out.with_name(out.name + ".part")
    try:
        shutil.copyfile(video, part)
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise MediaError(
            f"The video is whole, but {out} can't be written ({error.strerror}). It is in {video}."
        ) from error


@contextmanager
def job_folder(arguments: argparse.Namespace) -> Iterator[Path]:
    """A folder for the job's files: the one to keep, or a temporary one that stays if it holds what would be lost."""
    if arguments.keep:
        yield arguments.keep
        return
    folder = Path(tempfile.mkdtemp(prefix="pan2-", dir=arguments.out.absolute().parent))
    try:
        yield folder
    except BaseException:
        latents = folder / "latents.safetensors"
        if latents.exists():
            again = f"python -m engine decode --latents {latents} --out {arguments.out}"
            print(f"The latents are kept; decode them again with: {again}", file=sys.stderr)
        elif not (folder / "video.mp4").exists():
            shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0: done; 1: failed; 2: bad input; 130: stopped. Anything but 0 leaves one line on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    words = sys.argv[1:] if arguments is None else arguments
    command = words[0] if words[:1] in (["compare"], ["decode"]) else None
    parsers = {"compare": compare_cli.parser, "decode": decode_parser, None: parser}
    given = parsers[command]().parse_args(words[1:] if command else words)
    cancel = threading.Event()
    _stop_on_signals(cancel)
    try:
        if not command and given.plan:
            tell(plan(given))
            return 0
        if command == "compare":
            stats = compare_cli.compare(given, cancel, Progress().show)
        else:
            stats = decode(given, cancel) if command else generate(given, cancel)
    except (EngineError, KeyboardInterrupt, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        stopped = isinstance(error, (Cancelled, KeyboardInterrupt))
        return STOPPED if stopped else BAD_INPUT if isinstance(error, RequestError) else FAILED
    if given.json:
        tell(json.dumps(stats))
    elif command == "compare":
        tell(compare_cli.table(stats))
    if command == "compare":
        return FAILED if compare_cli.failed(stats) else 0
    return STOPPED if stats["partial"] else 0


def _stop_on_signals(cancel: threading.Event) -> None:
    """The first signal stops within a step or chunk and keeps what is there; a second Ctrl-C ends the program."""

    def stop(*_: object) -> None:
        cancel.set()
        signal.signal(signal.SIGINT, signal.default_int_handler)

    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, stop)


if __name__ == "__main__":
    broken.leave(main())

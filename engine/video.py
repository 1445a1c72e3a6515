"""Frames to mp4: a file that plays while it grows, and the final one.

Two ffmpeg processes a job get the same raw frames once. One writes fragments with little delay, the other a smaller
file of better quality. In one process with two outputs the live file gets its last frame only after the final encoder
has ended: 6 to 8 seconds late for 97 frames of 1248 x 704 on two busy cores, against 0.02 with two. One frame a
fragment costs about 90 bytes a frame and starts to play after frame 2; fragments of 250 ms start after frame 7 and
hold up to six frames back while the decoder works on the next chunk.
"""

from __future__ import annotations

import json
import logging
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from PIL import Image

from engine import ffmpeg
from engine.errors import MediaError

log = logging.getLogger(__name__)

LIVE_NAME = "live.mp4"
FINAL_NAME = "video.mp4"
TITLE_LENGTH = 200
THUMBNAIL_SIDE = 480

# RGB is full range; players take HD for BT.709, so convert with its matrix and say so. A tag alone converts nothing.
TO_BT709_TAGS = "setparams=range=limited:color_primaries=bt709:color_trc=bt709:colorspace=bt709"
TO_BT709 = (
    "scale=in_range=full:out_range=limited:out_color_matrix=bt709:flags=bicubic+accurate_rnd+full_chroma_int,"
    "format=yuv420p," + TO_BT709_TAGS
)
TAGS = ("-color_range", "tv", "-colorspace", "bt709", "-color_primaries", "bt709", "-color_trc", "bt709")
X264 = ("-an", "-fps_mode", "passthrough", "-c:v", "libx264", "-pix_fmt", "yuv420p", *TAGS)
# Look-ahead and B-frames would hold a 49-frame clip back until its end.
LIVE = ("-preset", "veryfast", "-tune", "zerolatency", "-crf", "20")
FRAGMENTS = ("-movflags", "empty_moov+default_base_moof+frag_every_frame+skip_trailer", "-flush_packets", "1")
FINAL = ("-preset", "faster", "-crf", "17", "-movflags", "+faststart")

STREAM_LINE = re.compile(
    r"Stream #0:\d+.*?: Video: (?P<codec>\w+).*?, (?P<pix_fmt>\w+)(?:\((?P<colour>[^)]*)\))?, "
    r"(?P<width>\d+)x(?P<height>\d+).*?, (?P<fps>[\d.]+) fps"
)
NEEDS_ESCAPE, ESCAPED = re.compile(r"([=;#\\])"), r"\\\1"
COMMENT = re.compile(r"^comment=((?:\\.|[^\\\n])*)", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class VideoInfo:
    """What a video file really holds. frames: counted by decoding all of them; colour fields: "unknown" if untagged."""

    frames: int
    height: int
    width: int
    fps: float
    codec: str
    pix_fmt: str
    color_range: str
    color_space: str
    color_primaries: str
    color_transfer: str


class VideoWriter:
    """Writes `live.mp4` and `video.mp4` into `folder`; a context manager.

    folder: exists; height, width: even; fps: whole; frames: how many will come; metadata: the job's settings, kept as
    JSON in the file, its prompt as the title. `video.mp4` appears when it is whole and checked; leaving the block by an
    exception removes everything but an older `video.mp4`. `written`: frames so far; `last`: a copy of the newest
    one; `live_finished`: the live file grows no more.
    Raises MediaError for a size that can't be written and when ffmpeg can't start.
    """

    def __init__(
        self, folder: Path, height: int, width: int, fps: int, frames: int, metadata: Mapping[str, Any]
    ) -> None:
        _check_shape(height, width, fps, frames)
        self.height, self.width, self.fps, self.frames = height, width, fps, frames
        self.live = folder / LIVE_NAME
        self.path = folder / FINAL_NAME
        self.written = 0
        self.last: np.ndarray | None = None
        self.live_finished = False
        self.info: VideoInfo | None = None
        self._part = folder / (FINAL_NAME + ".part")
        # A reader may still have the file of an earlier run open: give it a new one instead of cutting that short.
        self.live.unlink(missing_ok=True)
        self._settings = _settings_file(metadata)
        self._encoders: list[ffmpeg.Encoder] = []
        try:
            self._encoders.append(ffmpeg.Encoder(LIVE_NAME, self._live_arguments(), needed=False))
            self._encoders.append(ffmpeg.Encoder(FINAL_NAME, self._final_arguments()))
        except BaseException:
            self.abort()
            raise

    def _input(self) -> list[str]:
        size = f"{self.width}x{self.height}"
        return ["-f", "rawvideo", "-pix_fmt", "rgb24", "-video_size", size, "-framerate", str(self.fps), "-i", "pipe:0"]

    def _live_arguments(self) -> list[str]:
        keyframe_every = str(max(1, self.fps // 2))
        output = [*LIVE, "-g", keyframe_every, *FRAGMENTS, "-f", "mp4", f"file:{self.live}"]
        return [*self._input(), "-map_metadata", "-1", "-vf", TO_BT709, *X264, *output]

    def _final_arguments(self) -> list[str]:
        settings = ["-f", "ffmetadata", "-i", f"file:{self._settings.name}", "-map", "0:v:0", "-map_metadata", "1"]
        return [*self._input(), *settings, "-vf", TO_BT709, *X264, *FINAL, "-f", "mp4", f"file:{self._part}"]

    def write(self, frames: Any) -> list[str]:
        """Add frames, uint8 [t, height, width, 3] in host memory (numpy or torch). Waits for a slow ffmpeg. Returns
        what the user should know, which is nothing as a rule.

        Raises MediaError for another shape or type, for more frames than were announced, and if ffmpeg fails to write
        the final file; if it fails to write the live one, the video goes on.
        """
        array = self._checked(frames)
        try:
            failed = ffmpeg.feed(self._encoders, memoryview(array).cast("B"))
        except BaseException:
            self.abort()
            raise
        self.written += len(array)
        # The caller's memory is used again.
        self.last = array[-1].copy() if len(array) else self.last
        return [self._go_on_without(encoder, error) for encoder, error in failed]

    def _go_on_without(self, encoder: ffmpeg.Encoder, error: MediaError) -> str:
        """Watching the video grow is worth less than having it."""
        encoder.kill()
        self._encoders.remove(encoder)
        self.live_finished = True
        return f"This video can't be watched while it is made any more; it plays once it is whole. {error}"

    def _checked(self, frames: Any) -> np.ndarray:
        array = np.asarray(frames)
        if array.dtype != np.uint8 or array.shape[1:] != (self.height, self.width, 3):
            raise MediaError(
                f"Frames of shape {list(array.shape)} and type {array.dtype} can't go into this video: "
                f"it takes uint8 [t, {self.height}, {self.width}, 3]."
            )
        if not self._encoders:
            raise MediaError("This video is closed and takes no more frames. Start a new one.")
        if self.written + len(array) > self.frames:
            raise MediaError(
                f"{self.written + len(array)} frames came and {self.frames} were announced. "
                "Announce the real count when the video is started."
            )
        return np.ascontiguousarray(array)

    def close(self, partial: bool = False) -> Path:
        """End both files, check the final one and give it its name; returns its path.

        partial: fewer frames than announced are fine (the user stopped the work), but not none at all.
        Raises MediaError if frames are missing, ffmpeg fails or the file is not what was asked for; none is left then.
        """
        if self.info is not None:
            return self.path
        try:
            self._check_count(partial)
            self._finish()
            info = probe(self._part)
            self._check_file(info)
            self._part.replace(self.path)
        except BaseException:
            self.abort()
            raise
        self.info = info
        return self.path

    def _finish(self) -> None:
        seconds = _seconds_allowed(self.written, self.height, self.width)
        for encoder in self._encoders:
            encoder.end_input()
        for encoder in self._encoders:
            try:
                encoder.finish(seconds)
            except MediaError as error:
                if encoder.needed:
                    raise
                encoder.kill()
                log.warning("%s", error)
            self.live_finished = True
        self._encoders.clear()
        self._settings.close()

    def abort(self) -> None:
        """End both processes at once and remove what they wrote. Safe to call twice, and after `close`."""
        for encoder in self._encoders:
            encoder.kill()
        self._encoders.clear()
        self._settings.close()
        self.live_finished = True
        if self.info is None:
            self._part.unlink(missing_ok=True)
            self.live.unlink(missing_ok=True)

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.abort()

    def _check_count(self, partial: bool) -> None:
        if not self._encoders:
            raise MediaError("This video was given up after an error; there is nothing to close. Start a new one.")
        if not self.written:
            raise MediaError("Not a single frame was written, so there is no video to keep. Decode again.")
        if self.written < self.frames and not partial:
            raise MediaError(
                f"Only {self.written} of {self.frames} frames came, so the video is not whole. "
                "Decode again, or close it as a partial video."
            )

    def _check_file(self, info: VideoInfo) -> None:
        wanted = VideoInfo(
            self.written, self.height, self.width, float(self.fps), "h264", "yuv420p", "tv", "bt709", "bt709", "bt709"
        )
        if info != wanted:
            raise MediaError(
                f"The video that ffmpeg wrote is not the one asked for. Found {info}, wanted {wanted}. "
                "Decode again, or try another ffmpeg."
            )


def probe(path: Path) -> VideoInfo:
    """Decode a whole mp4 and say what is in it. Raises MediaError if it is no video or doesn't decode to its end."""
    _check_exists(path)
    # Only the mp4 reader, so that a file from outside can't name other files or addresses.
    source = ["-f", "mov", "-i", f"file:{path}", "-map", "0:v:0", "-fps_mode", "passthrough"]
    done = ffmpeg.run(["-xerror", *source, "-f", "null", "-nostats", "-progress", "pipe:1", "-"], seconds=900)
    stream = STREAM_LINE.search(done.stderr)
    counts = re.findall(r"^frame=(\d+)", done.stdout, re.MULTILINE)
    if done.returncode or stream is None or not counts:
        raise MediaError(f"{path.name} does not play to its end: {ffmpeg.last_lines(done.stderr)}. Make it again.")
    color_range, *colours = _colours(stream["colour"] or "")
    return VideoInfo(
        int(counts[-1]),
        int(stream["height"]),
        int(stream["width"]),
        float(stream["fps"]),
        stream["codec"],
        stream["pix_fmt"],
        color_range,
        *colours,
    )


def _colours(text: str) -> tuple[str, str, str, str]:
    """Range, matrix, primaries and transfer from ffmpeg's "tv, bt709, progressive" or "tv, bt709/unknown/bt709"."""
    words = [word.strip() for word in text.split(",")]
    color_range = next((word for word in words if word in ("tv", "pc")), "unknown")
    rest = [word for word in words if word and word not in ("tv", "pc", "progressive") and " " not in word]
    names = rest[0].split("/") if rest else ["unknown"]
    matrix, primaries, transfer = names if len(names) == 3 else names[:1] * 3
    return color_range, matrix, primaries, transfer


def rescue(folder: Path) -> Path | None:
    """Make `video.mp4` of the live file of a writer that is gone, as far as it plays; returns its path, None if there
    is no live file. Raises MediaError if nothing of it can be played."""
    live, final = folder / LIVE_NAME, folder / FINAL_NAME
    if not live.is_file():
        return None
    # Not the writer's name for it: its ffmpeg may outlive it for a moment.
    part = folder / "rescued.mp4.part"
    source = ["-y", "-loglevel", "error", "-f", "mov", "-i", f"file:{live}", "-map", "0:v:0", "-c", "copy"]
    try:
        done = ffmpeg.run([*source, "-movflags", "+faststart", "-f", "mp4", f"file:{part}"], seconds=60)
        if done.returncode:
            raise MediaError(f"{live.name} can't be read: {ffmpeg.last_lines(done.stderr)}.")
        probe(part)
    except MediaError:
        part.unlink(missing_ok=True)
        raise
    return part.replace(final)


def read_settings(path: Path) -> dict[str, Any]:
    """The settings that VideoWriter put into an mp4. Raises MediaError if it is none or holds no settings."""
    _check_exists(path)
    source = ["-loglevel", "error", "-f", "mov", "-i", f"file:{path}"]
    done = ffmpeg.run([*source, "-f", "ffmetadata", "pipe:1"], seconds=60)
    if done.returncode:
        raise MediaError(f"{path.name} is not an mp4 that can be read: {ffmpeg.last_lines(done.stderr)}.")
    found = COMMENT.search(done.stdout)
    try:
        settings = json.loads(re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL)) if found else None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise MediaError(f"{path.name} holds no settings. Videos made here have them until somebody re-encodes them.")
    return settings


def thumbnail(frame: Any, path: Path, side: int = THUMBNAIL_SIDE) -> Path:
    """Write one frame, uint8 [H, W, 3], as a JPEG whose longer side is at most `side` pixels; returns its path."""
    image = Image.fromarray(np.asarray(frame))
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    part = path.with_name(path.name + ".part")
    image.save(part, format="JPEG", quality=88)
    return part.replace(path)


def _check_exists(path: Path) -> None:
    if not path.is_file():
        raise MediaError(f"There is no video {path.name}. It may have been deleted; make it again.")


def _check_shape(height: int, width: int, fps: int, frames: int) -> None:
    if height % 2 or width % 2 or height < 2 or width < 2:
        even = f"{max(2, width // 2 * 2)} x {max(2, height // 2 * 2)}"
        raise MediaError(f"A video of {width} x {height} (width x height): both must be even. Use {even}.")
    if fps < 1 or fps != int(fps) or frames < 1:
        raise MediaError(f"{frames} frames at {fps} a second: both must be whole numbers of at least 1.")


def _seconds_allowed(frames: int, height: int, width: int) -> float:
    """How long ffmpeg may work after the last frame: a minute, and a second for every two million pixels."""
    return 60 + frames * height * width / 2e6


def _settings_file(metadata: Mapping[str, Any]) -> Any:
    """A temporary file in ffmpeg's metadata format: on the command line settings meet a limit and show in `ps`."""
    prompt = str((metadata.get("request") or metadata).get("prompt") or "")
    title = " ".join(prompt.replace("\0", " ").split())
    if len(title) > TITLE_LENGTH:
        title = title[: TITLE_LENGTH - 1] + "…"
    # ASCII JSON is one line without control characters, whatever the prompt holds.
    values = {"title": title, "comment": json.dumps(metadata, default=str)}
    lines = [f"{key}={NEEDS_ESCAPE.sub(ESCAPED, value)}\n" for key, value in values.items()]
    file = tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".ffmeta")  # noqa: SIM115 - closed with the writer
    file.write(";FFMETADATA1\n" + "".join(lines))
    file.flush()
    return file

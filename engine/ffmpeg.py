"""ffmpeg as a process: started, fed with raw frames, waited for, and quoted when it fails."""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import subprocess
import tempfile
from collections.abc import Sequence

from engine.errors import MediaError

STALL_SECONDS = 120.0
QUOTED_LINES = 4
QUOTED_BYTES = 4096
PIPE_BYTES = 1 << 20
NO_FFMPEG = "Reinstall imageio-ffmpeg, or set IMAGEIO_FFMPEG_EXE to the path of an ffmpeg that has libx264."
FIX = "Check that the folder can be written to and that the disk is not full, then decode again."


def executable() -> str:
    """Path of the ffmpeg program that imageio-ffmpeg brings along. Raises MediaError if there is none."""
    try:
        # Here, since what decodes without writing a video does without it.
        import imageio_ffmpeg

        return imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        raise MediaError(f"There is no ffmpeg here, and videos are written with it. {NO_FFMPEG}") from error


def run(arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run ffmpeg to its end and keep what it said. Raises MediaError if it can't start or needs more than `seconds`."""
    command = [executable(), "-hide_banner", "-nostdin", *arguments]
    try:
        return subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", timeout=seconds
        )
    except OSError as error:
        raise MediaError(f"ffmpeg could not be started: {error}. {NO_FFMPEG}") from error
    except subprocess.TimeoutExpired as error:
        raise MediaError(
            f"ffmpeg did not finish within {seconds:.0f} seconds. The machine may be overloaded; try again."
        ) from error


def last_lines(text: str) -> str:
    """The end of what ffmpeg said, on one line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-QUOTED_LINES:]) or "it gave no reason"


class Encoder:
    """One ffmpeg that reads raw frames from its standard input. name: of the file it writes, for error messages;
    needed: whether the work is in vain if it fails."""

    def __init__(self, name: str, arguments: Sequence[str], needed: bool = True) -> None:
        self.name, self.needed = name, needed
        # A file, since a pipe that nobody reads fills up and stops ffmpeg.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        command = [executable(), "-hide_banner", "-nostdin", "-y", "-loglevel", "warning", *arguments]
        try:
            # A session of its own: Ctrl-C in the terminal must reach us, not cut the file short behind our back.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._said,
                bufsize=0,
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            raise MediaError(f"ffmpeg could not be started for {name}: {error}. {NO_FFMPEG}") from error
        self._prepare_pipe()

    def _prepare_pipe(self) -> None:
        os.set_blocking(self.pipe, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            # Over the user's limit it fails; the default size works too, with more wake-ups.
            with contextlib.suppress(OSError):
                fcntl.fcntl(self.pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    @property
    def pipe(self) -> int:
        """File descriptor of ffmpeg's standard input; never blocks."""
        return self._process.stdin.fileno()

    def end_input(self) -> None:
        """Tell ffmpeg that no more frames come."""
        self._process.stdin.close()

    def finish(self, seconds: float) -> None:
        """Wait until ffmpeg has written everything. Raises MediaError if it fails or needs longer than `seconds`."""
        self.end_input()
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            self.kill()
            raise MediaError(
                f"ffmpeg had not finished {self.name} {seconds:.0f} seconds after the last frame. "
                "The machine may be overloaded or the disk very slow; decode again."
            ) from error
        if code:
            raise MediaError(f"ffmpeg failed to write {self.name} (exit code {code}): {self._reason()}. {FIX}")
        self._said.close()

    def broken(self) -> MediaError:
        """The error to raise when ffmpeg closed its input too early."""
        try:
            code = self._process.wait(5)
        except subprocess.TimeoutExpired:
            code = None
        return MediaError(
            f"ffmpeg stopped reading while writing {self.name} (exit code {code}): {self._reason()}. {FIX}"
        )

    def kill(self) -> None:
        """End the process at once, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self.end_input()
        self._said.close()

    def _reason(self) -> str:
        if self._said.closed:
            return "it gave no reason"
        # pread: ffmpeg writes at the offset that it shares with us, so it must not move.
        size = os.fstat(self._said.fileno()).st_size
        tail = os.pread(self._said.fileno(), QUOTED_BYTES, max(0, size - QUOTED_BYTES))
        return last_lines(tail.decode("utf-8", "replace")).rstrip(".")


def feed(encoders: Sequence[Encoder], data: memoryview) -> list[tuple[Encoder, MediaError]]:
    """Give the same bytes to every encoder, each at its own speed; returns when all have taken them.

    An encoder fails if it ends, or takes nothing for STALL_SECONDS while nobody else does. Raises MediaError if a
    needed one fails; returns the others that do, with the reason.
    """
    rest = {encoder.pipe: data for encoder in encoders}
    failed: list[tuple[Encoder, MediaError]] = []
    with selectors.DefaultSelector() as selector:
        for encoder in encoders:
            selector.register(encoder.pipe, selectors.EVENT_WRITE, encoder)
        while selector.get_map():
            ready = [key.data for key, _ in selector.select(STALL_SECONDS)]
            failed += [] if ready else _stalled([key.data for key in selector.get_map().values()])
            for encoder in ready:
                try:
                    rest[encoder.pipe] = rest[encoder.pipe][_write_some(encoder, rest[encoder.pipe]) :]
                except MediaError as error:
                    if encoder.needed:
                        raise
                    failed.append((encoder, error))
            for encoder in [key.data for key in selector.get_map().values()]:
                if not rest[encoder.pipe] or encoder in (one for one, _ in failed):
                    selector.unregister(encoder.pipe)
    return failed


def _stalled(encoders: Sequence[Encoder]) -> list[tuple[Encoder, MediaError]]:
    names = " and ".join(encoder.name for encoder in encoders)
    error = MediaError(f"ffmpeg took no data for {names} in {STALL_SECONDS:.0f} seconds. {FIX}")
    if any(encoder.needed for encoder in encoders):
        raise error
    return [(encoder, error) for encoder in encoders]


def _write_some(encoder: Encoder, data: memoryview) -> int:
    try:
        return os.write(encoder.pipe, data)
    except BlockingIOError:
        return 0
    except BrokenPipeError as error:
        raise encoder.broken() from error

"""What VideoWriter leaves on disk, read back through ffmpeg itself."""

from __future__ import annotations

import signal
import struct
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image

from engine import ffmpeg
from engine.errors import MediaError
from engine.video import VideoWriter, probe, read_settings, thumbnail

HEIGHT, WIDTH, FPS = 64, 96, 24
SETTINGS = {
    "request": {"prompt": 'A "red; fox" = 1 # ünï 😀\nsecond \\ line', "seed": 123, "guidance": 2.5, "image": None},
    "versions": {"torch": "2.13.0"},
}


def moving(frames: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """A gradient that moves, uint8 [frames, height, width, 3]: no two frames are the same."""
    t, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    return np.stack([(x * 2 + t * 5) % 256, (y * 3 + t) % 256, (x + y + t * 9) % 256], axis=-1).astype(np.uint8)


def write(folder: Path, frames: np.ndarray, expected: int | None = None) -> VideoWriter:
    return VideoWriter(folder, frames.shape[1], frames.shape[2], FPS, expected or len(frames), SETTINGS)


def boxes(data: bytes) -> list[str]:
    """Names of the whole top-level boxes of an mp4."""
    names, at = [], 0
    while at + 8 <= len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        if size < 8 or at + size > len(data):
            break
        names.append(name.decode())
        at += size
    return names


def live_boxes(writer: VideoWriter) -> list[str]:
    """The boxes of the live file by now; ffmpeg makes the file a moment after its start."""
    return boxes(writer.live.read_bytes()) if writer.live.exists() else []


def wait_for(condition, seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def decoded(path: Path) -> np.ndarray:
    """Frames of a file as a BT.709 player shows them: uint8 [t, H, W, 3]."""
    info = probe(path)
    convert = "scale=in_color_matrix=bt709:in_range=limited:out_range=full:flags=accurate_rnd+full_chroma_int"
    command = [ffmpeg.executable(), "-v", "error", "-i", str(path), "-vf", f"{convert},format=rgb24"]
    raw = subprocess.run([*command, "-f", "rawvideo", "-"], capture_output=True, check=True).stdout
    return np.frombuffer(raw, np.uint8).reshape(-1, info.height, info.width, 3)


def fake_ffmpeg(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a shell script in ffmpeg's place; "$REAL" in it is the real one."""
    path = folder / "ffmpeg.sh"
    path.write_text(f'#!/bin/sh\nREAL="{ffmpeg.executable()}"\n{script}\n')
    path.chmod(0o755)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(path))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def test_file_is_what_was_asked_for(folder):
    frames = moving(49)
    with write(folder, frames) as writer:
        writer.write(frames[:1])
        for start in range(1, 49, 16):
            writer.write(torch.from_numpy(frames[start : start + 16]))
        assert writer.close() == folder / "video.mp4"
    assert sorted(path.name for path in folder.iterdir()) == ["live.mp4", "video.mp4"]
    for name in ("live.mp4", "video.mp4"):
        info = probe(folder / name)
        assert (info.frames, info.height, info.width, info.fps) == (49, HEIGHT, WIDTH, FPS), name
        assert (info.codec, info.pix_fmt, info.color_range) == ("h264", "yuv420p", "tv"), name
        assert {info.color_space, info.color_primaries, info.color_transfer} == {"bt709"}, name
    assert writer.info == probe(folder / "video.mp4")
    assert writer.live_finished and writer.written == 49
    layout = boxes((folder / "video.mp4").read_bytes())
    assert layout.index("moov") < layout.index("mdat"), "not ready for streaming"


@pytest.mark.parametrize("name", ["video.mp4", "live.mp4"])
@pytest.mark.parametrize("colour", [(200, 30, 30), (128, 128, 128), (20, 40, 210), (255, 255, 255), (0, 0, 0)])
def test_colours_come_back_within_three_levels(folder, colour, name):
    frames = np.broadcast_to(np.array(colour, np.uint8), (3, HEIGHT, WIDTH, 3))
    with write(folder, frames) as writer:
        writer.write(frames)
    worst = np.abs(decoded(folder / name).astype(int) - np.array(colour)).max()
    assert worst <= 3, f"{colour} came back {worst} levels off"


def test_frames_keep_their_order(folder):
    frames = np.stack([np.full((HEIGHT, WIDTH, 3), 20 + 5 * k, np.uint8) for k in range(40)])
    with write(folder, frames) as writer:
        writer.write(frames)
    for name in ("live.mp4", "video.mp4"):
        means = decoded(folder / name).mean(axis=(1, 2, 3))
        assert np.abs(means - (20 + 5 * np.arange(40))).max() < 2.5, name


def test_settings_come_back(folder):
    with write(folder, moving(5)) as writer:
        writer.write(moving(5))
    assert read_settings(folder / "video.mp4") == SETTINGS
    said = ffmpeg.run(["-i", str(folder / "video.mp4")], seconds=20).stderr
    assert 'title           : A "red; fox" = 1 # ünï 😀 second \\ line' in said


def test_long_settings_come_back(folder):
    settings = {"prompt": "word; = # \\ \n" * 20000, "list": list(range(100))}
    with VideoWriter(folder, HEIGHT, WIDTH, FPS, 1, settings) as writer:
        writer.write(moving(1))
    assert read_settings(folder / "video.mp4") == settings


def test_files_without_settings_are_refused_in_words(folder):
    with write(folder, moving(2)) as writer:
        writer.write(moving(2))
    with pytest.raises(MediaError, match="holds no settings"):
        read_settings(folder / "live.mp4")
    (folder / "text.mp4").write_text("#EXTM3U\nhttp://localhost/secret\n")
    for read in (read_settings, probe):
        with pytest.raises(MediaError, match=r"text\.mp4"):
            read(folder / "text.mp4")
        with pytest.raises(MediaError, match="no video"):
            read(folder / "nothing.mp4")


def test_cut_file_is_noticed(folder):
    with write(folder, moving(20)) as writer:
        writer.write(moving(20))
    whole = (folder / "video.mp4").read_bytes()
    (folder / "cut.mp4").write_bytes(whole[: len(whole) * 2 // 3])
    with pytest.raises(MediaError, match="does not play to its end"):
        assert probe(folder / "cut.mp4").frames == 20


@pytest.mark.parametrize(("height", "width"), [(65, 96), (64, 97), (63, 95), (0, 96)])
def test_odd_sizes_are_refused_before_anything_starts(folder, height, width):
    with pytest.raises(MediaError, match="even"):
        VideoWriter(folder, height, width, FPS, 5, SETTINGS)
    assert not list(folder.iterdir())


def test_size_that_is_no_multiple_of_16_stays(folder):
    frames = moving(3, 90, 100)
    with write(folder, frames) as writer:
        writer.write(frames)
    assert (writer.info.height, writer.info.width) == (90, 100)


@pytest.mark.parametrize(
    "frames",
    [moving(2, 64, 98), moving(2).astype(np.float32), moving(1)[0], np.zeros((2, HEIGHT, WIDTH, 4), np.uint8)],
)
def test_wrong_frames_are_refused_and_the_writer_goes_on(folder, frames):
    with write(folder, moving(2)) as writer:
        with pytest.raises(MediaError, match="uint8"):
            writer.write(frames)
        writer.write(moving(2))
    assert writer.info.frames == 2


def test_too_many_and_too_few_frames(folder):
    with pytest.raises(MediaError, match="announced"), write(folder, moving(4), 3) as writer:
        writer.write(moving(4))
    with pytest.raises(MediaError, match="Only 2 of 3"), write(folder, moving(2), 3) as writer:
        writer.write(moving(2))
    assert not list(folder.iterdir())


def test_strided_frames(folder):
    frames = moving(6, HEIGHT, WIDTH * 2)[::2, :, ::2]
    with write(folder, frames) as writer:
        writer.write(frames)
    assert np.abs(decoded(folder / "video.mp4").astype(int) - frames).mean() < 12


@pytest.mark.parametrize("error", [RuntimeError("decoder broke"), KeyboardInterrupt(), GeneratorExit()])
def test_exception_leaves_nothing(folder, error):
    with pytest.raises(type(error)), write(folder, moving(30)) as writer:
        writer.write(moving(20))
        raise error
    assert not list(folder.iterdir())
    assert writer.live_finished
    with pytest.raises(MediaError, match="closed"):
        writer.write(moving(1))
    with pytest.raises(MediaError, match="given up"):
        writer.close()


def test_exception_keeps_the_video_of_an_earlier_run(folder):
    with write(folder, moving(3)) as writer:
        writer.write(moving(3))
    before = (folder / "video.mp4").read_bytes()
    with pytest.raises(ValueError, match="later"), write(folder, moving(9)) as writer:
        writer.write(moving(9))
        raise ValueError("later")
    assert [path.name for path in folder.iterdir()] == ["video.mp4"]
    assert (folder / "video.mp4").read_bytes() == before


def test_stop_keeps_a_whole_shorter_file(folder):
    with write(folder, moving(17), 49) as writer:
        writer.write(moving(17))
        writer.close(partial=True)
    assert probe(folder / "video.mp4").frames == probe(folder / "live.mp4").frames == 17
    assert read_settings(folder / "video.mp4") == SETTINGS


def test_stop_before_the_first_frame_says_so(folder):
    with pytest.raises(MediaError, match="Not a single frame"), write(folder, moving(1), 49) as writer:
        writer.close(partial=True)
    assert not list(folder.iterdir())


def test_one_frame(folder):
    with write(folder, moving(1)) as writer:
        writer.write(moving(1))
    assert probe(folder / "video.mp4").frames == probe(folder / "live.mp4").frames == 1


def test_live_file_plays_before_the_end(folder):
    with write(folder, moving(49)) as writer:
        for k, frame in enumerate(moving(49)[:17]):
            writer.write(frame[None])
            if k == 7:
                assert wait_for(lambda: "moof" in live_boxes(writer)), "nothing to play after 8 frames"
        assert wait_for(lambda: live_boxes(writer).count("moof") >= 16), "frames were held back"
        growing = writer.live.read_bytes()
        assert boxes(growing)[:2] == ["ftyp", "moov"]
        (folder / "copy.mp4").write_bytes(growing)
        assert probe(folder / "copy.mp4").frames >= 16
        assert not writer.live_finished and not writer.path.exists()
        writer.close(partial=True)


def test_live_file_of_a_second_run_is_a_new_file(folder):
    with write(folder, moving(3)) as writer:
        writer.write(moving(3))
    with (folder / "live.mp4").open("rb") as reader:
        first = reader.read()
        with write(folder, moving(9)) as writer:
            writer.write(moving(9))
        reader.seek(0)
        assert reader.read() == first


def test_slow_ffmpeg_loses_no_frame(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, '(sleep 1; cat) | "$REAL" "$@"')
    frames = moving(60, 128, 192)
    started = time.monotonic()
    with write(folder, frames) as writer:
        monkeypatch.delenv("IMAGEIO_FFMPEG_EXE")
        writer.write(frames)
        assert time.monotonic() - started > 0.8, "the pipe holds less than this clip, so the write had to wait"
    assert writer.info.frames == 60


def test_broken_ffmpeg_is_quoted(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, 'echo "Unknown encoder libx264" >&2; exit 8')
    with pytest.raises(MediaError, match=r"exit code 8.*Unknown encoder libx264"), write(folder, moving(60)) as writer:
        for frame in moving(60, HEIGHT, WIDTH):
            writer.write(frame[None])
        writer.close()
    assert not list(folder.iterdir())


def test_ffmpeg_that_dies_later_is_quoted(folder, tmp_path, monkeypatch):
    script = 'head -c 200000 >/dev/null; yes chatter | head -c 300000 >&2; echo "No space left on device" >&2; exit 1'
    fake_ffmpeg(tmp_path, monkeypatch, script)
    frames = moving(200)
    with pytest.raises(MediaError, match="No space left on device"), write(folder, frames) as writer:
        for start in range(0, 200, 16):
            writer.write(frames[start : start + 16])
    assert not list(folder.iterdir())


def test_ffmpeg_that_fails_at_the_end_is_quoted(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, 'cat >/dev/null; echo "Error closing file" >&2; exit 5')
    with pytest.raises(MediaError, match=r"exit code 5.*Error closing file"), write(folder, moving(3)) as writer:
        writer.write(moving(3))
    assert not list(folder.iterdir())


def live_ffmpeg():
    """The process that writes the live file."""
    children = psutil.Process().children()
    return next(child for child in children if child.cmdline()[-1].endswith("live.mp4"))


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_if_only_the_live_ffmpeg_fails_the_video_goes_on(folder, monkeypatch, how):
    frames = moving(400)
    with write(folder, frames) as writer:
        assert writer.write(frames[:16]) == []
        monkeypatch.setattr(ffmpeg, "STALL_SECONDS", 3)
        process = live_ffmpeg()
        process.send_signal(how)
        said = [text for start in range(16, 400, 16) for text in writer.write(frames[start : start + 16])]
        assert not psutil.pid_exists(process.pid) and writer.live_finished
    assert len(said) == 1 and "plays once it is whole" in said[0] and "live.mp4" in said[0]
    assert writer.info.frames == probe(folder / "video.mp4").frames == 400
    assert {path.name for path in folder.iterdir()} <= {"live.mp4", "video.mp4"}


def test_a_live_ffmpeg_that_fails_at_the_end_costs_nothing(folder):
    with write(folder, moving(3)) as writer:
        writer.write(moving(3))
        live_ffmpeg().send_signal(signal.SIGKILL)
    assert writer.info.frames == 3 and writer.live_finished


def test_ffmpeg_that_hangs_is_ended(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, "exec sleep 60")
    monkeypatch.setattr(ffmpeg, "STALL_SECONDS", 0.3)
    with pytest.raises(MediaError, match="took no data"), write(folder, moving(200)) as writer:
        writer.write(moving(200))
    assert not list(folder.iterdir())


def test_ffmpeg_that_never_ends_is_ended(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, "cat >/dev/null; exec sleep 60")
    monkeypatch.setattr("engine.video._seconds_allowed", lambda *_: 0.3)
    with pytest.raises(MediaError, match="had not finished"), write(folder, moving(3)) as writer:
        writer.write(moving(3))


def test_file_with_a_frame_missing_gets_no_final_name(folder, tmp_path, monkeypatch):
    fake_ffmpeg(tmp_path, monkeypatch, f'head -c {HEIGHT * WIDTH * 3 * 4} | "$REAL" "$@"; cat >/dev/null')
    with pytest.raises(MediaError, match="not the one asked for"), write(folder, moving(5)) as writer:
        writer.write(moving(5))
    assert not list(folder.iterdir())


def test_missing_ffmpeg_says_what_to_do(folder, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", str(folder / "no-such-program"))
    with pytest.raises(MediaError, match="Reinstall imageio-ffmpeg"):
        write(folder, moving(2))
    assert not list(folder.iterdir())


def test_thumbnail(tmp_path):
    path = thumbnail(moving(1, 704, 1248)[0], tmp_path / "thumbnail.jpg", side=320)
    image = Image.open(path)
    assert (image.format, image.size) == ("JPEG", (320, 181))
    assert [found.name for found in tmp_path.iterdir()] == ["thumbnail.jpg"]

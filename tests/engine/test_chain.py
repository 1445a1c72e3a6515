"""Chains of videos: what leads to what, and one file of all without the doubled frames."""

import subprocess
from pathlib import Path

import numpy as np
import pytest

from engine import ffmpeg
from engine.chain import join, lineage, observation
from engine.errors import MediaError, RequestError
from engine.job import JobState
from engine.preset import load_preset
from engine.video import VideoWriter, probe

HEIGHT, WIDTH = 64, 96


def clip(folder: Path, shades, width: int = WIDTH) -> Path:
    """A video with one grey frame for each shade."""
    folder.mkdir()
    with VideoWriter(folder, HEIGHT, width, 24, len(shades), {}) as writer:
        writer.write(np.stack([np.full((HEIGHT, width, 3), shade, np.uint8) for shade in shades]))
    return folder / "video.mp4"


def shades_of(video: Path) -> list[float]:
    """The mean of every frame."""
    data = subprocess.run(
        [ffmpeg.executable(), "-loglevel", "error", "-i", str(video), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"],
        capture_output=True,
        check=True,
    ).stdout
    return [float(frame.mean()) for frame in np.frombuffer(data, np.uint8).reshape(-1, HEIGHT, WIDTH, 3)]


def video(id: str, folder: Path, parent: str | None = None, there: bool = True) -> JobState:
    request = load_preset("tiny").request(prompt=id)
    path = folder / "video.mp4" if there else None
    return JobState(id=id, folder=folder, request=request, parent=parent, status="finished", video=path)


def test_joined_without_the_doubled_frames(tmp_path):
    parts = [[20, 40, 60, 80, 100], [100, 120, 140, 160, 180], [180], [180, 200, 220, 230, 240]]
    clips = [clip(tmp_path / str(k), shades) for k, shades in enumerate(parts)]
    path = join(clips, tmp_path / "chain.mp4")
    info = probe(path)
    assert (info.frames, info.height, info.width, info.fps) == (13, HEIGHT, WIDTH, 24)
    assert (info.pix_fmt, info.color_range, info.color_space) == ("yuv420p", "tv", "bt709")
    wanted = [20, 40, 60, 80, 100, 120, 140, 160, 180, 200, 220, 230, 240]
    assert shades_of(path) == pytest.approx(wanted, abs=3)
    assert not list(tmp_path.glob("*.part"))


def test_what_cannot_be_joined_is_refused_and_leaves_nothing(tmp_path):
    clips = [clip(tmp_path / "a", [20, 40, 60]), clip(tmp_path / "b", [60, 80], width=128)]
    with pytest.raises(MediaError, match="differ in size"):
        join(clips, tmp_path / "chain.mp4")
    (tmp_path / "b" / "video.mp4").write_bytes(b"no video")
    with pytest.raises(MediaError, match="does not play"):
        join(clips, tmp_path / "chain.mp4")
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == []


def test_a_lineage_ends_where_it_is_not_known_and_survives_a_circle(tmp_path):
    jobs = {
        "b": video("b", tmp_path, parent="deleted"),
        "c": video("c", tmp_path, parent="b"),
        "d": video("d", tmp_path, parent="c"),
        "broken": video("broken", tmp_path, there=False),
        "after": video("after", tmp_path, parent="broken"),
        "x": video("x", tmp_path, parent="y"),
        "y": video("y", tmp_path, parent="x"),
    }
    names = {name: [state.id for state in lineage(jobs.get, name)] for name in [*jobs, "unknown"]}
    assert names["d"] == ["b", "c", "d"] and names["b"] == ["b"] and names["after"] == ["after"]
    assert names["x"] == ["y", "x"] and names["broken"] == [] and names["unknown"] == []


def test_only_a_video_that_has_ended_can_be_gone_on_from(tmp_path):
    state = video("a", tmp_path)
    with pytest.raises(RequestError, match="not known here any more"):
        observation(None)
    with pytest.raises(RequestError, match="no last frame yet"):
        observation(state)
    (tmp_path / "last.png").write_bytes(b"")
    assert observation(state) == tmp_path / "last.png"
    state.status = "running"
    with pytest.raises(RequestError, match="no last frame yet"):
        observation(state)

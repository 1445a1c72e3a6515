"""What is written about a job, on a disk that does not take it."""

import logging
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from engine import record
from engine.errors import MediaError, ResourceError
from engine.request import Request

FRAMES = np.zeros((3, 32, 48, 3), np.uint8)


@pytest.fixture
def request_(toy_preset) -> Request:
    return toy_preset.request()


def test_a_prepared_folder_holds_request_and_picture(tmp_path, request_):
    record.prepare_folder(tmp_path / "outputs" / "job", request_, Image.new("RGB", (8, 8)))
    names = sorted(path.name for path in (tmp_path / "outputs" / "job").iterdir())
    assert names == ["image.png", "request.json"]


def test_a_folder_that_cannot_be_made_is_named_with_the_fix(tmp_path, request_):
    (tmp_path / "outputs").write_text("not a folder")
    with pytest.raises(ResourceError, match="ENGINE_OUTPUTS") as caught:
        record.prepare_folder(tmp_path / "outputs" / "job", request_, None)
    assert str(tmp_path / "outputs" / "job") in str(caught.value)


@pytest.mark.parametrize("image", [None, Image.new("RGB", (8, 8))])
def test_a_folder_that_cannot_be_written_to_is_named_with_the_fix(tmp_path, request_, image, monkeypatch):
    def refuse(*_args, **_options):
        raise OSError(30, "Read-only file system")

    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(Path, "write_text", refuse)
    monkeypatch.setattr(Image.Image, "save", refuse)
    with pytest.raises(ResourceError, match=r"Read-only file system.*Make it writable") as caught:
        record.prepare_folder(tmp_path, request_, image)
    assert str(tmp_path) in str(caught.value) and not list(tmp_path.iterdir())


def test_json_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path):
    path = tmp_path / "stats.json"
    path.mkdir()  # nothing can be renamed to it
    with pytest.raises(ResourceError, match="could not be written") as caught:
        record.write_json(path, {"frames": 9})
    assert str(path) in str(caught.value) and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), MediaError("no JPEG")])
def test_a_thumbnail_that_fails_is_only_logged(tmp_path, monkeypatch, caplog, error):
    def fail(frame, path):
        path.with_name(path.name + ".part").touch()
        raise error

    monkeypatch.setattr(record, "thumbnail", fail)
    with caplog.at_level(logging.WARNING, "engine.record"):
        record.keep_thumbnail(tmp_path, FRAMES, 3, 9)
    assert str(tmp_path / "thumbnail.jpg") in caplog.text and str(error) in caplog.text
    assert not list(tmp_path.iterdir())


def test_the_thumbnail_is_of_the_first_chunk_and_then_of_the_middle(tmp_path):
    for written, value in ((3, 10), (6, 120), (9, 250)):
        record.keep_thumbnail(tmp_path, np.full_like(FRAMES, value), written, 9)
    assert abs(int(np.asarray(Image.open(tmp_path / "thumbnail.jpg")).mean()) - 120) < 4

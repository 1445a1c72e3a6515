"""Finding a checkpoint: folders, a Hub on this machine, and every refusal in words. Nothing here leaves the machine."""

from __future__ import annotations

import errno
import hashlib
import http.server
import json
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants, errors
from huggingface_hub.utils import filter_repo_objects

from engine import checkpoint, hub
from engine.errors import Cancelled, CheckpointError, ResourceError
from tests.toy import write_toy_checkpoint

NAME = "IFM/PAN2"
SHA = "a" * 40


@pytest.fixture
def copy(toy_checkpoint: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))


def refused(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.resolve(name)
    return str(caught.value)


# Folders


def test_a_folder_is_taken_as_it_is(toy_checkpoint):
    assert checkpoint.resolve(str(toy_checkpoint)) == toy_checkpoint


def test_a_missing_folder_is_named_with_the_way_to_give_one(tmp_path):
    for name in (str(tmp_path / "absent"), "./a/b", "~/nothing/here", "a/b/c", "one-word", "-a/b", ""):
        message = refused(name)
        if name:
            assert name in message and "ENGINE_CHECKPOINT=PATH" in message


def test_an_incomplete_folder_is_refused_with_a_hint(copy, tmp_path):
    assert f"This looks like one of its parts; try {copy}" in refused(str(copy / "transformer"))
    assert "is a file" in refused(str(copy / "transformer" / "config.json"))
    shutil.rmtree(copy / "vae")
    shutil.rmtree(copy / "scheduler")
    assert "lacks vae, scheduler" in refused(str(copy))
    (tmp_path / "cache" / "snapshots").mkdir(parents=True)
    assert "below snapshots/" in refused(str(tmp_path / "cache"))
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "model_state.pt").touch()
    assert "convert them" in refused(str(tmp_path / "training"))


# Hashes


def test_a_flipped_byte_is_named(copy):
    hub.write_checksums(copy)
    assert checkpoint.resolve(str(copy)) == copy
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1000] ^= 1
    path.write_bytes(whole)
    message = refused(str(copy))
    assert f"1 files of {copy} are damaged" in message and f"{path}. Delete them and download them again" in message
    path.unlink()
    assert f"1 files of {copy} are missing: {path}" in refused(str(copy))


def test_checksums_are_those_of_sha256sum(copy):
    listing = hub.write_checksums(copy)
    names = [line.split("  ")[1] for line in listing.read_text().splitlines()]
    assert "transformer/config.json" in names and names == sorted(names)
    calls = []
    assert checkpoint.verify(copy, lambda *call: calls.append(call)) == len(names)
    assert calls[-1][0] == "verify" and calls[-1][1] == calls[-1][2]
    listing.write_text("no hash here\n")
    assert "as sha256sum writes them" in refused(str(copy))


@pytest.mark.parametrize("name", ["/etc/passwd", "../../etc/passwd", "vae/../../other", "*../other"])
def test_checksums_of_files_outside_of_the_folder_are_refused(copy, name):
    listing = hub.write_checksums(copy)
    with listing.open("a") as file:
        file.write(f"{'0' * 64}  {name}\n")
    assert f"names files outside of its folder: {name.removeprefix('*')}" in refused(str(copy))


def test_checksums_that_are_no_text_or_name_no_possible_file_are_refused(copy):
    listing = copy / hub.CHECKSUMS
    listing.write_bytes(b"\xff\xfe" * 40)
    assert f"{listing} can't be read as text" in refused(str(copy))
    listing.write_text(f"{'0' * 64}  {'x' * 5000}\n")
    assert "are missing" in refused(str(copy))


def test_large_folders_are_only_hashed_when_asked(copy, monkeypatch):
    hub.write_checksums(copy)
    monkeypatch.setattr(hub, "SMALL", 1000)
    monkeypatch.setattr(hub, "verify", lambda *_: pytest.fail("hashed"))
    assert checkpoint.resolve(str(copy)) == copy


# Refusals of the Hub


def http_error(kind: type, status: int, text: str = "Some words.\n\nAdvice.") -> Exception:
    return kind(text, response=SimpleNamespace(headers={}, request=None, status_code=status))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FAILURES = {
    "gated": (http_error(errors.GatedRepoError, 403), "Accept its licence at https://huggingface.co/IFM/PAN2"),
    "token": (http_error(errors.HfHubHTTPError, 401), "set HF_TOKEN"),
    "forbidden": (http_error(errors.HfHubHTTPError, 403), "HfHubHTTPError: Some words."),
    "hidden 403": (
        caused(errors.LocalEntryNotFoundError("Got: ..."), http_error(errors.HfHubHTTPError, 403)),
        "Accept its licence",
    ),
    "disabled": (http_error(errors.DisabledRepoError, 403), "has disabled access"),
    "unknown": (http_error(errors.RepositoryNotFoundError, 404), "no folder and no Hub repository IFM/PAN2"),
    "revision": (http_error(errors.RevisionNotFoundError, 404), "no Hub repository"),
    "name": (errors.HFValidationError("bad"), "Check the name"),
    "not cached": (
        caused(errors.LocalEntryNotFoundError("no"), ConnectionError("Network is unreachable")),
        "not in the local cache and the Hub can't be reached (ConnectionError: Network is unreachable)",
    ),
    "partly cached": (errors.IncompleteSnapshotError("no", snapshot_path="x"), "is incomplete in the local cache"),
    "offline": (errors.OfflineModeIsEnabled("no"), "Check the connection"),
    "busy": (http_error(errors.HfHubHTTPError, 429), "asks for a pause"),
    "down": (http_error(errors.HfHubHTTPError, 503), "could not be downloaded (HfHubHTTPError: Some words.)"),
    "other": (ValueError("what"), "could not be downloaded (ValueError: what). Try again; what has arrived is kept"),
}


def fail_with(monkeypatch, error: Exception, dry: Exception | None = None) -> None:
    def fail(name, *, allow_patterns, dry_run=False, **_):
        assert name == NAME and allow_patterns == list(hub.PATTERNS)
        raise (dry or errors.DryRunError("no")) if dry_run else error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)


@pytest.mark.parametrize("case", FAILURES)
def test_every_refusal_of_the_hub_says_what_to_do(monkeypatch, case):
    error, words = FAILURES[case]
    fail_with(monkeypatch, error)
    message = refused(NAME)
    assert words in message and NAME in message and "Advice" not in message
    if case not in ("busy",):
        assert "--checkpoint PATH" in message
    fail_with(monkeypatch, ValueError(), dry=error)
    assert words in refused(NAME)


def test_offline_mode_is_named(monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fail_with(monkeypatch, errors.LocalEntryNotFoundError("no"))
    assert "HF_HUB_OFFLINE forbids to fetch it" in refused(NAME)


def test_the_real_library_in_offline_mode(monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "is not in the local cache and HF_HUB_OFFLINE forbids" in refused(NAME)


def test_a_full_disk_is_said(monkeypatch):
    fail_with(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(ResourceError, match="The disk is full and IFM/PAN2 is not complete"):
        checkpoint.resolve(NAME)


def test_too_small_a_disk_is_said_before_the_download(monkeypatch, tmp_path):
    def plan(name, *, dry_run=False, **_):
        assert dry_run, "downloaded"
        files = [("a", 60, True), ("b", 30, True), ("c", 500, False)]
        return [SimpleNamespace(filename=n, file_size=s << 30, will_download=w) for n, s, w in files]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", plan)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=10 << 30))
    with pytest.raises(ResourceError, match=r"needs 90.0 GiB and the disk of .*yet has 10.0 GiB free.*HF_HOME"):
        checkpoint.resolve(NAME)


def test_only_configurations_tokenizer_and_safetensors_are_asked_for():
    files = [
        "transformer/config.json",
        "transformer/diffusion_pytorch_model-00001-of-00014.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "text_encoder/model.safetensors",
        "tokenizer/tokenizer.json",
        "tokenizer/merges.txt",
        "tokenizer/chat_template.jinja",
        "scheduler/scheduler_config.json",
        "vae/config.json",
    ]
    other = ["transformer/model.py", "vae/diffusion_pytorch_model.bin", "x.pt", "pipeline.py", "tokenizer/code.py"]
    other += ["assets/demo.mp4", "README.md", "model.safetensors", "text_encoder/model.pt", "safety/model.safetensors"]
    assert list(filter_repo_objects(files + other, allow_patterns=list(hub.PATTERNS))) == files


# A Hub on this machine


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the Hub as a download needs, over the files of `root`."""

    root: Path
    asked: list[str]
    damaged = ""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        if path == f"/api/models/{NAME}/revision/main":
            self.answer(json.dumps({"id": NAME, "sha": SHA, "siblings": []}).encode())
        elif path == f"/api/models/{NAME}/tree/{SHA}":
            self.answer(json.dumps([self.listed(f) for f in sorted(self.root.rglob("*")) if f.is_file()]).encode())
        elif path.startswith(f"/{NAME}/resolve/{SHA}/"):
            name = path.removeprefix(f"/{NAME}/resolve/{SHA}/")
            data = (self.root / name).read_bytes()
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": SHA}
            self.answer(data[:-1] + b"?" if name == self.damaged else data, headers)
        else:
            self.send_error(404)

    def listed(self, path: Path) -> dict:
        data = path.read_bytes()
        lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 100}
        name = path.relative_to(self.root).as_posix()
        return {"type": "file", "path": name, "oid": "b" * 40, "size": len(data), "lfs": lfs}

    def answer(self, body: bytes, headers: dict | None = None):
        self.send_response(200)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def local_hub(tmp_path, monkeypatch):
    """A running Hub with a toy checkpoint and some files that nobody needs; the library is pointed at it."""
    root = write_toy_checkpoint(tmp_path / "repository")
    (root / "transformer" / "modeling.py").write_text("raise SystemExit('remote code')")
    (root / "demo.bin").write_bytes(b"0" * 100)
    handler = type("Handler", (Hub,), {"root": root, "asked": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = f"http://127.0.0.1:{server.server_port}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_repository_is_fetched_checked_and_kept(local_hub, monkeypatch):
    calls = []
    folder = checkpoint.resolve(NAME, lambda *call: calls.append(call))
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "transformer/modeling.py" not in found and "demo.bin" not in found
    assert checkpoint.describe(folder).transformer.files == 3
    size = sum((folder / name).stat().st_size for name in found)
    for part in ("download", "verify"):
        done = [call for call in calls if call[0] == part]
        assert [c[1] for c in done] == sorted(c[1] for c in done) and done[-1] == (part, size, size)
    local_hub.asked.clear()
    assert checkpoint.resolve(NAME) == folder
    assert not [line for line in local_hub.asked if line.startswith("GET /IFM")]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert checkpoint.resolve(NAME) == folder


def test_a_file_that_arrives_damaged_is_named_and_fetched_again(local_hub):
    local_hub.damaged = damaged = "vae/diffusion_pytorch_model.safetensors"
    message = refused(NAME)
    assert damaged in message and "1 files of IFM/PAN2 arrived damaged and were deleted" in message
    local_hub.damaged = ""
    local_hub.asked.clear()
    folder = checkpoint.resolve(NAME)
    assert [line for line in local_hub.asked if line.startswith("GET /IFM")] == [f"GET /{NAME}/resolve/{SHA}/{damaged}"]
    assert checkpoint.verify(folder) == len([path for path in folder.rglob("*") if path.is_file()])


def test_a_download_can_be_cancelled(local_hub):
    def cancel(part, done, total):
        raise Cancelled(part)

    with pytest.raises(Cancelled, match="download"):
        checkpoint.resolve(NAME, cancel)


def test_a_repository_without_the_parts_is_refused(local_hub):
    shutil.rmtree(local_hub.root / "vae")
    assert "lacks vae" in refused(NAME)


def test_a_repository_that_the_hub_does_not_know_is_refused(local_hub):
    assert "nobody/nothing" in refused("nobody/nothing")


def test_local_finds_what_is_here_and_downloads_nothing(toy_checkpoint, monkeypatch, tmp_path):
    assert hub.local(str(toy_checkpoint)) == toy_checkpoint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    assert hub.local("someone/elsewhere") is None

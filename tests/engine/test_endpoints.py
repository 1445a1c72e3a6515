"""The public endpoints over a real engine and real HTTP: files and JSON come out, and no file of the server goes in."""

import json
from pathlib import Path

import httpx
import pytest
import torch
from gradio.utils import get_upload_folder
from gradio_client import Client, handle_file
from gradio_client.exceptions import AppError
from PIL import Image

from engine.engine import Engine
from engine.latents import save_latents
from engine.video import probe
from tests.double import serve

SMALL = {"prompt": "a red circle", "seconds": 0.2, "height": 64, "width": 64, "steps": 1}


@pytest.fixture(scope="module")
def served(toy_preset, tmp_path_factory):
    with serve(Engine(toy_preset, "cpu"), tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    return Client(served.url, verbose=False)


@pytest.fixture(scope="module")
def made(client):
    """The answer of one call of /generate."""
    return client.predict(**SMALL, api_name="/generate")


@pytest.fixture
def latents(tmp_path):
    save_latents(tmp_path / "mine.safetensors", torch.linspace(-1, 1, 48 * 2 * 4 * 4).reshape(1, 48, 2, 4, 4), {})
    return tmp_path / "mine.safetensors"


def test_a_video_is_made_decoded_again_and_compared(client, made):
    path, stats = made
    assert probe(Path(path)).frames == stats["frames"] == 5
    again, figures = client.predict(job=stats["job"], decoder="reference", api_name="/decode")
    assert probe(Path(again)).frames == figures["frames"] == 5
    assert (figures["decode"]["decoder"], figures["latents_sha256"]) == ("reference", stats["latents_sha256"])
    result, a, b = client.predict(job=stats["job"], a="plain", b="reference:fp32", frames=5, api_name="/compare")
    assert result["frames"] == 5 and result["figures"] and probe(Path(a)) == probe(Path(b))


def test_uploaded_latents_are_decoded(client, latents):
    path, stats = client.predict(latents=handle_file(latents), api_name="/decode")
    info = probe(Path(path))
    assert (info.frames, info.height, info.width) == (5, 64, 64) and stats["status"] == "finished"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({}, "Name either a job or a file of latents"),
        ({"job": "20260101-000000-00000000"}, "is not known here"),
        ({"job": "../../etc"}, "is not known here"),
        ({"job": ["x"]}, "is not known here"),
        ({"job": 5}, "is not known here"),
        ({"job": "x", "decoder": "magic"}, "'magic' is not known"),
        ({"job": "x", "decoder": 7}, "'7' is not known"),
        ({"job": "x", "memory_gib": 4}, "memory_gib = 4 is kept to by the paths built and portable alone"),
        ({"job": "x", "memory_gib": "a"}, "memory_gib = 'a' must be a number of GiB"),
    ],
)
def test_a_bad_decode_is_refused_in_words(served, client, call, words):
    before = len(served.jobs.recent())
    with pytest.raises(AppError, match=words):
        client.predict(**call, api_name="/decode")
    assert len(served.jobs.recent()) == before


def test_both_sources_at_once_are_one_too_many(client, made, latents):
    with pytest.raises(AppError, match="and not both"):
        client.predict(job=made[1]["job"], latents=handle_file(latents), api_name="/decode")


def test_latents_larger_than_the_preset_does_are_refused(client, tmp_path):
    save_latents(tmp_path / "large.safetensors", torch.zeros(1, 48, 1, 64, 64), {})
    with pytest.raises(AppError, match=r"large\.safetensors|at most|must lie between") as refused:
        client.predict(latents=handle_file(tmp_path / "large.safetensors"), api_name="/decode")
    assert str(tmp_path) not in str(refused.value) and "/tmp" not in str(refused.value)


def test_a_bomb_of_a_header_is_refused(client, tmp_path):
    bomb = tmp_path / "bomb.safetensors"
    bomb.write_bytes((90 * 2**20).to_bytes(8, "little") + b" " * 2**20)
    for endpoint in ("/decode", "/compare"):
        with pytest.raises(AppError, match="header of 94371840 bytes"):
            client.predict(latents=handle_file(bomb), api_name=endpoint)


def test_a_bomb_of_a_picture_is_refused(client, tmp_path):
    bomb = tmp_path / "bomb.png"
    Image.new("1", (30_000, 30_000)).save(bomb)
    assert bomb.stat().st_size < 2**20
    with pytest.raises(AppError, match=r"(at most|more than) 80000000 pixels"):
        client.predict(**SMALL, image=handle_file(bomb), api_name="/generate")


# ---- files of the server


FILES = ("image", "file", "video", "uploadbutton", "gallery", "audio", "imageslider")
MARKED = {"meta": {"_type": "gradio.FileData"}}


def takers(served):
    """Every event of the page and the API that takes a file, by its number, its values and where its files go."""
    config = httpx.get(f"{served.url}/config").json()
    parts = {part["id"]: part for part in config["components"]}
    for event in config["dependencies"]:
        places = [place for place, number in enumerate(event["inputs"]) if parts[number]["type"] in FILES]
        if event["backend_fn"] and places:
            values = [parts[number]["props"].get("value") for number in event["inputs"]]
            yield event, values, places


def send(served, event, data):
    """Call an event as the page would; returns everything that the server says."""
    call = {"data": data, "fn_index": event["id"], "session_hash": f"s{event['id']}"}
    if event["queue"] is False:
        return httpx.post(f"{served.url}/gradio_api/run/predict", json=call, timeout=60).text
    httpx.post(f"{served.url}/gradio_api/queue/join", json=call, timeout=60).raise_for_status()
    with httpx.stream("GET", f"{served.url}/gradio_api/queue/data?session_hash=s{event['id']}", timeout=60) as answer:
        return "".join(line for line in answer.iter_lines() if "process_" in line)


def evil(served, made, secret, link):
    """What is no upload: addresses, files of the server, of a job, and links to them."""
    own = served.jobs.snapshot(made[1]["job"])
    paths = [
        "http://169.254.169.254/latest/meta-data", "https://127.0.0.1:1/a.png", "file:///etc/passwd", "/etc/passwd",
        "../../../../etc/passwd", str(secret), str(link), str(own.video), str(own.latents),
        str(own.folder / "job.json"),
        "gopher://127.0.0.1/", "//127.0.0.1/a.png", "/proc/self/environ", "/dev/zero",
    ]  # fmt: skip
    return [{"path": path, "url": path, **MARKED} for path in paths] + [{"path": path} for path in paths]


def test_no_event_takes_anything_but_an_upload(served, made, tmp_path):
    secret = tmp_path / "secret.png"
    Image.new("RGB", (64, 64)).save(secret)
    sent = httpx.post(f"{served.url}/gradio_api/upload", files={"files": ("a.png", secret.read_bytes())}).json()[0]
    link = Path(sent).with_name("link.png")
    link.unlink(missing_ok=True)
    link.symlink_to(secret)
    before, events = len(served.jobs.recent()), list(takers(served))
    assert {event["api_name"] for event, *_ in events} >= {"generate", "decode", "compare"} and len(events) > 5
    for event, values, places in events:
        for place in places:
            for number, file in enumerate(evil(served, made, secret, link)):
                # Every kind on the public events, one of each kind of path on the page's own, which share the fields.
                if event["api_visibility"] == "private" and number % 5:
                    continue
                said = send(served, event, [file if at == place else value for at, value in enumerate(values)])
                assert "Upload the file itself" in said, (event["api_name"], file, said[:300])
                assert "root:" not in said and str(secret.parent) not in said.replace(json.dumps(file), "")
    assert len(served.jobs.recent()) == before


def test_uploads_keep_to_their_folder(served):
    names = ["../../evil.png", "/etc/evil.png", "..\\..\\evil.png", "a/../../evil.png", "\0.png", "x" * 300 + ".png"]
    for name in names:
        answer = httpx.post(f"{served.url}/gradio_api/upload", files={"files": (name, b"x")})
        if answer.status_code == 200:
            path = Path(answer.json()[0])
            assert path.parent.parent == Path(get_upload_folder()) and ".." not in path.parts

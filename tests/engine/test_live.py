"""The growing file over HTTP: a real server on a free port, plain httpx clients, a writer thread."""

from __future__ import annotations

import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from starlette.testclient import TestClient

from engine.web import live
from engine.web.live import LiveSource, live_router


@dataclass
class Job:
    """A file that the test lets grow."""

    path: Path
    over: threading.Event = field(default_factory=threading.Event)
    asked: int = 0

    def finished(self) -> bool:
        self.asked += 1
        return self.over.is_set()

    def add(self, data: bytes) -> None:
        with self.path.open("ab") as file:
            file.write(data)


@pytest.fixture
def jobs(tmp_path: Path) -> dict[str, Job]:
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (tmp_path / "a").mkdir()
    return {"job-1": Job(tmp_path / "a" / "live.mp4"), "job-2": Job(tmp_path / "a" / "other.mp4")}


@pytest.fixture
def app(jobs: dict[str, Job]) -> FastAPI:
    def find(name: str) -> LiveSource | None:
        job = jobs.get(name)
        return LiveSource(job.path, job.finished) if job else None

    app = FastAPI()
    app.include_router(live_router(find))
    return app


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        # From here on a client waits for the server; before, it would be refused.
        listener.listen(128)
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def address(app: FastAPI) -> Iterator[str]:
    with serving(app) as address:
        yield address


def test_finished_file_comes_whole_and_is_not_cached(app, jobs):
    jobs["job-1"].add(b"x" * 600_000)
    jobs["job-1"].over.set()
    answer = TestClient(app).get("/live/job-1.mp4")
    assert answer.status_code == 200 and answer.content == b"x" * 600_000
    assert answer.headers["content-type"] == "video/mp4"
    assert answer.headers["cache-control"] == "no-store"
    assert "content-length" not in answer.headers


@pytest.mark.parametrize(
    "name", ["nobody", "..%2Fsecret", "%2e%2e/secret", "a/../../secret", "job-1%00", "x" * 200, "secret", "job 1"]
)
def test_only_known_jobs(app, name):
    answer = TestClient(app).get(f"/live/{name}.mp4")
    assert answer.status_code == 404 and b"secret" not in answer.content


def test_answers_without_a_file_are_sentences(app, jobs):
    client = TestClient(app)
    waiting = client.get("/live/job-1.mp4")
    assert (waiting.status_code, waiting.headers["retry-after"]) == (202, "1")
    assert waiting.text == "Decoding has not begun yet."
    jobs["job-1"].over.set()
    assert client.get("/live/job-1.mp4").text == "This job ended without a live video."
    assert "no such job" in client.get("/live/nobody.mp4").text


def test_goes_on_from_a_byte(app, jobs):
    jobs["job-1"].add(b"0123456789")
    jobs["job-1"].over.set()
    client = TestClient(app)
    assert client.get("/live/job-1.mp4?from=4").content == b"456789"
    assert client.get("/live/job-1.mp4?from=10").content == b""
    for bad in ("11", "-1", "x", "9" * 30):
        answer = client.get(f"/live/job-1.mp4?from={bad}")
        assert answer.status_code == 416 and "beginning" in answer.text


def test_bytes_arrive_while_the_file_grows(address, jobs):
    job = jobs["job-1"]
    job.add(b"first")
    with httpx.stream("GET", f"{address}/live/job-1.mp4", timeout=10) as answer:
        parts = answer.iter_raw()
        assert next(parts) == b"first"
        for text in (b"second", b"third"):
            started = time.monotonic()
            job.add(text)
            assert next(parts) == text
            assert time.monotonic() - started < 2
        job.add(b"last")
        job.over.set()
        assert b"".join(parts) == b"last"


def test_waits_without_spinning(address, jobs, monkeypatch):
    job = jobs["job-1"]
    job.add(b"start")
    with httpx.stream("GET", f"{address}/live/job-1.mp4", timeout=10) as answer:
        next(answer.iter_raw())
        before = job.asked
        time.sleep(1)
        assert job.asked - before <= 1 / live.POLL_SECONDS + 2


def test_many_clients_and_other_requests_meanwhile(address, jobs):
    job, count = jobs["job-1"], 60
    job.add(b"a" * 100_000)
    got: list[bytes] = []

    def read() -> None:
        with urllib.request.urlopen(f"{address}/live/job-1.mp4", timeout=30) as answer:
            got.append(answer.read())

    threads = [threading.Thread(target=read) for _ in range(count)]
    for thread in threads:
        thread.start()
    jobs["job-2"].over.set()
    assert httpx.get(f"{address}/live/job-2.mp4", timeout=10).status_code == 404
    job.add(b"b" * 100_000)
    job.over.set()
    for thread in threads:
        thread.join(20)
    assert got == [b"a" * 100_000 + b"b" * 100_000] * count


def test_ends_when_the_job_fails_and_its_file_is_removed(address, jobs):
    job = jobs["job-1"]
    job.add(b"what was there")
    with httpx.stream("GET", f"{address}/live/job-1.mp4", timeout=10) as answer:
        parts = answer.iter_raw()
        next(parts)
        job.path.unlink()
        job.over.set()
        assert b"".join(parts) == b""


def test_client_that_goes_away_is_let_go(address, jobs):
    job = jobs["job-1"]
    job.add(b"start")
    with httpx.stream("GET", f"{address}/live/job-1.mp4", timeout=10) as answer:
        next(answer.iter_raw())
    time.sleep(0.5)
    before = job.asked
    time.sleep(0.5)
    assert job.asked == before, "the server still reads for a client that has gone"

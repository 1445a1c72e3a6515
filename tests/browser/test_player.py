"""The player in a real browser, on files that a real VideoWriter writes at a set pace."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse

from engine.video import VideoWriter
from engine.web import live
from engine.web.live import LiveSource, live_router

pytestmark = pytest.mark.browser

HEIGHT, WIDTH, FPS, FRAMES = 176, 320, 24, 49
SECONDS = FRAMES / FPS
# What the player promises to do without: inline scripts and eval.
POLICY = "default-src 'self'; media-src 'self' blob:; img-src 'self' data:"
VIDEO = "document.querySelector('live-video').shadowRoot.querySelector('video')"
FIND_BLOCK = f"""(() => {{
  const video = {VIDEO}, canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  const context = canvas.getContext("2d");
  context.drawImage(video, 0, 0);
  const line = context.getImageData(0, 85, canvas.width, 1).data;
  const red = [...Array(canvas.width).keys()].filter((x) => line[4 * x] > 190 && line[4 * x + 1] < 80);
  return red.length ? red.reduce((a, b) => a + b) / red.length / 6 - 23 / 12 : -1;
}})()"""
SMALL_BUFFER = """
window.refused = 0;
const append = SourceBuffer.prototype.appendBuffer;
SourceBuffer.prototype.appendBuffer = function (bytes) {
  if (window.refused++ < 3) throw new DOMException("full", "QuotaExceededError");
  append.call(this, bytes);
};
"""
COUNT_ADDRESSES = """
window.addresses = new Set();
const [make, drop] = [URL.createObjectURL, URL.revokeObjectURL];
URL.createObjectURL = (thing) => { const url = make.call(URL, thing); window.addresses.add(url); return url; };
URL.revokeObjectURL = (url) => { window.addresses.delete(url); drop.call(URL, url); };
"""


def picture(k: int) -> np.ndarray:
    """A bright gradient with a block that moves: frame k is told by the block's place."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    frame = np.stack([90 + x % 128, 90 + y % 128, np.full_like(x, 140)], axis=-1).astype(np.uint8)
    frame[60:110, 6 * k : 6 * k + 24] = (230, 40, 40)
    return frame


class Job:
    """A VideoWriter in a thread: 1 frame, then chunks of 16, `pace` seconds before each.

    chunks: how many come by themselves, all by default; more() lets others follow. stop() is the user's; error: the
    decoder breaks after the last chunk.
    """

    def __init__(self, folder: Path, pace: float = 0.0, chunks: int = 4, error: bool = False) -> None:
        folder.mkdir()
        self.folder, self.pace, self.error = folder, pace, error
        self.writer: VideoWriter | None = None
        self.allowed = threading.Semaphore(chunks)
        self.stopped = False
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        frames = np.stack([picture(k) for k in range(FRAMES)])
        try:
            for start, stop in [(0, 1), *((k, k + 16) for k in range(1, FRAMES, 16))]:
                self.allowed.acquire()
                if self.stopped:
                    break
                time.sleep(self.pace)
                self.writer = self.writer or VideoWriter(self.folder, HEIGHT, WIDTH, FPS, FRAMES, {"prompt": "a block"})
                self.writer.write(frames[start:stop])
            if self.writer is None:
                return
            if self.error:
                raise ValueError("the decoder broke")
            self.writer.close(partial=True)
        except ValueError:
            self.writer.abort()

    def more(self, chunks: int = 4) -> None:
        self.allowed.release(chunks)

    def stop(self) -> None:
        self.stopped = True
        self.allowed.release()

    @property
    def written(self) -> int:
        return self.writer.written if self.writer else 0

    @property
    def over(self) -> bool:
        return not self.thread.is_alive()

    @property
    def final(self) -> Path:
        return self.folder / "video.mp4"


class Site:
    """A page with one element, the player's files, the live route, and a live route that breaks off once.

    asked: what was asked for, in order.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.jobs: dict[str, Job] = {}
        self.asked: list[str] = []
        app = FastAPI()
        app.include_router(live_router(self.find))
        app.get("/page")(self.page)
        app.get("/web/{name}")(self.asset)
        app.get("/final/{name}.mp4")(self.final)
        app.get("/flaky/{name}.mp4")(self.flaky)
        self.listener = socket.socket()
        self.listener.bind(("127.0.0.1", 0))
        self.listener.listen(128)
        self.address = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.app, self.reading = app, 0
        self.server = uvicorn.Server(
            uvicorn.Config(self.count, interface="asgi3", log_level="critical", timeout_graceful_shutdown=1)
        )
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    async def count(self, scope, receive, send) -> None:
        """Know how many clients read a growing file."""
        live = scope.get("path", "").startswith("/live/")
        self.reading += live
        try:
            await self.app(scope, receive, send)
        finally:
            self.reading -= live

    def close(self) -> None:
        for job in self.jobs.values():
            job.stop()
            job.thread.join()
        self.server.should_exit = True
        self.thread.join()
        self.listener.close()

    def start(self, name: str, **how) -> Job:
        self.jobs[name] = job = Job(self.folder / name, **how)
        return job

    def find(self, name: str) -> LiveSource | None:
        self.asked.append(name)
        job = self.jobs.get(name)
        return LiveSource(job.folder / "live.mp4", lambda: job.over) if job else None

    async def page(self, element: str = "") -> HTMLResponse:
        head = '<meta charset="utf-8"><title>player</title><script src="web/player.js" defer></script>'
        body = f"<!doctype html><head>{head}</head><body><main>{element}</main></body>"
        return HTMLResponse(body, headers={"Content-Security-Policy": POLICY})

    async def asset(self, name: str) -> FileResponse:
        return FileResponse(Path(live.__file__).with_name(name))

    async def final(self, name: str) -> Response:
        path = self.jobs[name].final
        return FileResponse(path) if path.is_file() else Response("not yet", 404)

    async def flaky(self, name: str, request: Request) -> Response:
        start = int(request.query_params.get("from", 0))
        self.asked.append(f"flaky from {start}")
        data = (self.jobs[name].folder / "live.mp4").read_bytes()

        async def body():
            if not start:
                yield data[: len(data) // 2]
                await asyncio.sleep(0.5)
                raise ConnectionError("the network went away")
            yield data[start:]

        return StreamingResponse(body(), media_type="video/mp4")


def element(name: str, src: str = "live", **more: str) -> str:
    """The element for a job; without a name it has no live file."""
    attributes = {"frames": FRAMES, "fps": FPS, "width": WIDTH, "height": HEIGHT} | more
    if name:
        attributes["src"] = f"{src}/{name}.mp4"
    return "<live-video " + " ".join(f'{key}="{value}"' for key, value in attributes.items()) + "></live-video>"


class Player:
    """What a test asks of the element on a page."""

    def __init__(self, page) -> None:
        self.page = page

    def video(self, expression: str) -> Any:
        return self.page.evaluate(f"(() => {{ const v = {VIDEO}; return {expression} }})()")

    @property
    def status(self) -> str:
        return self.page.locator("live-video #status").inner_text()

    @property
    def state(self) -> str:
        return self.page.locator("live-video #status").get_attribute("data-state")

    @property
    def ended(self) -> bool:
        return self.state == "ended"

    @property
    def stalled(self) -> bool:
        """Whether it has played what is there and waits for more; on a slow machine it also waits before it begins."""
        return self.state == "waiting" and self.video("v.currentTime") > 0.5

    @property
    def final(self) -> bool:
        """Whether a picture of the final file is on the screen."""
        return self.video("v.currentSrc.includes('/final/') && v.readyState >= 2 && !v.seeking && !!v.videoWidth")

    def block(self) -> float:
        """Index of the frame that is really on the screen, from where its block is; -1 without one (a black frame)."""
        return self.page.evaluate(FIND_BLOCK)

    def press(self, key: str) -> None:
        self.page.locator("live-video video").press(key)

    def set(self, name: str, value: object) -> None:
        self.page.evaluate("([n, v]) => document.querySelector('live-video').setAttribute(n, v)", [name, str(value)])

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """Wait for something, and say where the player was if it does not happen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if found := condition():
                return found
            self.page.wait_for_timeout(30)
        raise AssertionError(
            f"It did not happen: {self.status!r}, {self.video('[v.currentTime, v.duration, v.ended]')}"
        )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


@pytest.fixture
def context(chromium) -> Iterator[Any]:
    context = chromium.new_context(viewport={"width": 700, "height": 520})
    context.add_init_script(COUNT_ADDRESSES)
    yield context
    context.close()


@pytest.fixture
def show(context, site) -> Callable[[str], Player]:
    """Open a page with this element; a complaint in its console fails the test."""
    complaints: list[str] = []

    def open_page(element: str) -> Player:
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda line: line.type == "error" and complaints.append(line.text))
        page.goto(f"{site.address}/page?element={quote(element)}")
        return Player(page)

    yield open_page
    # The browser itself tells of answers and connections that the player deals with.
    assert not [line for line in complaints if not line.startswith("Failed to load resource")]


def test_plays_before_the_writer_has_finished(site, show):
    job = site.start("a", pace=0.6)
    player = show(element("a"))
    player.until(lambda: player.video("v.currentTime") > 0.2)
    assert not job.over
    assert player.video("v.duration") == pytest.approx(SECONDS, abs=0.01), "the time line is whole from the start"
    player.until(lambda: player.ended)
    assert player.video("[v.videoWidth, v.videoHeight]") == [WIDTH, HEIGHT]
    assert player.video("v.duration") == pytest.approx(SECONDS, abs=0.001)
    assert player.video("v.error") is None
    quality = player.video("(({totalVideoFrames: t, corruptedVideoFrames: c}) => [t, c])(v.getVideoPlaybackQuality())")
    assert quality[0] >= FRAMES - 2 and not quality[1]
    assert player.block() == pytest.approx(FRAMES - 1, abs=1)
    assert player.status == "49 frames, 2.0 s"


def test_as_fast_as_possible(site, show):
    site.start("a")
    player = show(element("a"))
    player.until(lambda: player.ended)
    assert player.status == "49 frames, 2.0 s"


def test_waits_for_a_slow_decoder_says_so_and_resumes(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    assert player.status == "Waiting for the decoder: 16 of 49 frames"
    assert player.block() == pytest.approx(15, abs=2)
    job.more(1)
    player.until(lambda: player.status == "Waiting for the decoder: 32 of 49 frames")
    job.more()
    player.until(lambda: player.ended)
    assert player.video("v.duration") == pytest.approx(SECONDS, abs=0.001)


def test_stop_in_the_middle_leaves_what_is_there(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    job.stop()
    player.until(lambda: player.ended)
    assert player.video("v.duration") == pytest.approx(17 / FPS, abs=0.001)
    assert player.status == "Stopped early: 17 of 49 frames, 0.7 s"
    assert player.block() == pytest.approx(16, abs=1)


def test_error_in_the_middle_leaves_what_is_there(site, show):
    job = site.start("a", chunks=3, error=True)
    player = show(element("a"))
    player.until(lambda: player.video("v.currentTime") > 0.1)
    job.stop()
    player.until(lambda: player.ended)
    assert not list(job.folder.iterdir())
    assert player.status.startswith("Stopped early: ") and player.video("v.error") is None


def test_waits_from_before_the_first_frame(site, show):
    job = site.start("a", chunks=0)
    player = show(element("a"))
    player.until(lambda: player.status == "Decoding has not begun yet.")
    job.more()
    player.until(lambda: player.ended)


def test_final_file_takes_over_without_a_jump(site, show):
    job = site.start("a")
    player = show(element("a"))
    player.until(lambda: player.ended and job.over)
    assert player.video("v.src").startswith("blob:")
    player.set("final", "final/a.mp4")
    player.until(lambda: player.final)
    assert player.block() == pytest.approx(FRAMES - 1, abs=1), "it jumped"
    assert player.video("v.paused") and not player.video("v.hasAttribute('poster')")
    assert player.page.evaluate("window.addresses.size") == 0
    player.press(" ")
    player.until(lambda: 0 < player.video("v.currentTime") < 1.5)
    player.until(lambda: player.ended)


def test_paused_place_is_kept_by_the_final_file(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    player.press(" ")
    player.press("ArrowLeft")
    player.until(lambda: not player.video("v.seeking"))
    before, block = player.video("v.currentTime"), player.block()
    job.more()
    # Where it stalled, a frame more or less, is the browser's affair.
    player.until(lambda: job.over and player.status == f"Frame {int(before * FPS) + 1} of 49")
    player.set("final", "final/a.mp4")
    player.until(lambda: player.final)
    assert player.video("v.currentTime") == pytest.approx(before, abs=0.01)
    assert player.block() == pytest.approx(block, abs=0.6)


def test_final_file_waits_until_a_playback_has_ended(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    job.more()
    player.until(lambda: job.over)
    player.page.evaluate(f"{VIDEO}.playbackRate = 0.25")
    player.set("final", "final/a.mp4")
    player.page.wait_for_timeout(300)
    assert player.video("v.src").startswith("blob:") and not player.video("v.paused")
    player.page.evaluate(f"{VIDEO}.playbackRate = 4")
    player.until(lambda: player.final)


def test_second_run_on_the_same_page(site, show):
    site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    site.start("b")
    player.set("src", "live/b.mp4")
    player.until(lambda: player.ended)
    assert player.status == "49 frames, 2.0 s"
    assert player.page.evaluate("window.addresses.size") == 0, "object URLs are left"
    player.until(lambda: site.reading == 0)


def test_two_clients(site, show):
    job = site.start("a", chunks=2)
    players = [show(element("a")), show(element("a"))]
    for player in players:
        player.page.bring_to_front()
        player.until(lambda player=player: player.stalled)
    job.more()
    for player in players:
        player.page.bring_to_front()
        player.until(lambda player=player: player.ended)
        assert player.status == "49 frames, 2.0 s"


def test_reload_starts_from_the_beginning(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    player.page.reload()
    player.until(lambda: player.stalled)
    job.more()
    player.until(lambda: player.ended)
    assert player.video("v.played.start(0)") == 0


def test_page_that_replaces_the_element_goes_on(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    # An address that has nothing to send yet may have been asked more than once.
    asked = list(site.asked)
    replace = "(html) => { document.querySelector('main').innerHTML = html }"
    player.page.evaluate(replace, f"<section>{element('a', label='again')}</section>")
    assert player.video("v.currentTime") > 0.5
    job.more()
    player.until(lambda: player.ended)
    assert site.asked == asked, "it was fetched again"
    assert player.video("v.getAttribute('aria-label')") == "again"
    player.page.evaluate(replace, "")
    player.page.wait_for_timeout(1200)
    assert player.page.evaluate("window.addresses.size") == 0


def test_element_that_is_taken_away_lets_go(site, show):
    site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled and site.reading == 1)
    player.page.evaluate("document.querySelector('main').innerHTML = ''")
    player.until(lambda: site.reading == 0)


def test_attributes_that_come_later(site, show):
    site.start("a")
    player = show("<live-video></live-video>")
    assert player.status == ""
    for name, value in [("fps", FPS), ("frames", FRAMES), ("src", "live/a.mp4")]:
        player.set(name, value)
    player.until(lambda: player.ended)
    assert player.status == "49 frames, 2.0 s"


def test_finished_job_plays_its_final_file_at_once(site, show):
    site.start("a").thread.join()
    player = show(element("a", final="final/a.mp4"))
    player.until(lambda: player.ended)
    assert site.asked == [] and player.final


def test_file_of_the_past_waits_for_its_viewer(site, show):
    site.start("a").thread.join()
    player = show(element("", final="final/a.mp4"))
    player.until(lambda: player.final)
    assert player.video("v.paused") and player.status == "Press play: 49 frames, 2.0 s"


def test_browser_without_media_source_waits_for_the_final_file(site, context, show):
    context.add_init_script("for (const name of ['MediaSource', 'ManagedMediaSource']) delete window[name]")
    site.start("a").thread.join()
    player = show(element("a"))
    player.until(lambda: "once it is whole" in player.status)
    player.set("final", "final/a.mp4")
    player.until(lambda: player.ended)
    assert player.status == "49 frames, 2.0 s"


def test_managed_media_source_as_on_an_iphone(site, context, show):
    context.add_init_script("window.ManagedMediaSource = window.MediaSource; delete window.MediaSource")
    site.start("a")
    player = show(element("a"))
    player.until(lambda: player.ended)
    assert player.video("v.disableRemotePlayback")


def test_full_buffer_is_tried_again(site, context, show):
    context.add_init_script(SMALL_BUFFER)
    site.start("a")
    player = show(element("a"))
    player.until(lambda: player.ended)
    assert player.page.evaluate("window.refused") > 3 and player.status == "49 frames, 2.0 s"


def test_keys_step_by_one_frame(site, show):
    job = site.start("a", chunks=3)
    player = show(element("a"))
    player.until(lambda: player.state == "waiting" and player.video("v.currentTime") > 1)
    player.press(" ")
    player.until(lambda: player.video("v.paused"))
    job.more()
    player.until(lambda: player.status.endswith(" of 49"))
    # Where it stalled, the clock may be a frame ahead of the screen; a first step brings both together.
    player.press("ArrowLeft")
    frame = player.until(lambda: player.status == f"Frame {round(player.block()) + 1} of 49" and round(player.block()))
    for key, step in [("ArrowRight", 1), ("ArrowRight", 1), ("ArrowLeft", -1), ("ArrowLeft", -1), ("ArrowLeft", -1)]:
        player.press(key)
        frame += step
        player.until(lambda frame=frame: round(player.block()) == frame)
        player.until(lambda frame=frame: player.status == f"Frame {frame + 1} of 49")
    player.press(" ")
    player.until(lambda: player.ended)


def test_pause_during_decoding_is_respected(site, show):
    job = site.start("a", chunks=2)
    player = show(element("a"))
    player.until(lambda: player.stalled)
    player.press(" ")
    player.until(lambda: re.fullmatch(r"Frame \d+ of 49: 16 of 49 frames are decoded", player.status))
    job.more()
    player.until(lambda: re.fullmatch(r"Frame \d+ of 49", player.status))
    player.page.wait_for_timeout(200)
    assert player.video("v.paused")


def test_lost_connection_goes_on_where_it_was(site, show):
    site.start("a").thread.join()
    player = show(element("a", src="flaky"))
    player.until(lambda: player.ended)
    assert site.asked[0] == "flaky from 0" and site.asked[-1] != "flaky from 0"
    assert player.status == "49 frames, 2.0 s"


def test_unknown_job_is_said_in_words(site, show):
    player = show(element("nobody"))
    player.until(lambda: player.state == "error")
    assert player.status.startswith("There is no such job here.")


def test_file_that_is_no_video_is_said_in_words(site, show):
    job = site.start("a", chunks=0)
    (job.folder / "live.mp4").write_bytes(b"\0\0\0\0 this is no mp4 at all")
    player = show(element("a"))
    player.until(lambda: player.state == "error")
    assert player.status == "The live video is no mp4 that this player knows."


def test_progress_labels_and_looks(site, show):
    job = site.start("a", chunks=3)
    player = show(element("a", label="A block &amp; a gradient"))
    player.until(lambda: player.state == "waiting" and player.video("v.currentTime") > 1)
    bar = player.page.locator("live-video progress")
    assert (bar.evaluate("bar => bar.value"), bar.evaluate("bar => bar.max")) == (32, FRAMES)
    assert player.video("v.getAttribute('aria-label')") == "A block & a gradient"
    assert player.page.locator("live-video [role=status]").count() == 1
    box = player.page.locator("live-video video").bounding_box()
    assert box["width"] / box["height"] == pytest.approx(WIDTH / HEIGHT, abs=0.02)
    if folder := os.environ.get("SCREENSHOTS"):
        player.page.screenshot(path=f"{folder}/player.png")
    job.more()
    player.until(lambda: player.ended)
    assert not bar.is_visible()

"""The World tab over an engine double: chains, branches, what is refused, what is served."""

import dataclasses

import gradio as gr
import httpx
import pytest
from PIL import Image

from engine.admission import QueueLimits
from engine.chain import chain_file
from engine.errors import RequestError
from engine.estimate import Estimate
from engine.jobs import Jobs
from engine.preset import load_preset
from engine.video import probe
from engine.web import world_render as show
from engine.web.world_form import WorldForm
from engine.web.world_tab import WorldTab
from tests.double import Double, Pace, serve
from tests.markup import Elements

PRESET = load_preset("tiny")
EVIL = """<script>alert("1")</script>'"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    engine = Double(PRESET)
    engine.load()
    with serve(engine, tmp_path_factory.mktemp("outputs")) as served:
        yield served


@pytest.fixture
def jobs(served):
    served.engine.pace = Pace()
    yield served.jobs
    for state in served.jobs.recent():
        served.jobs.cancel(state.id)
        served.jobs.wait(state.id)


def make(jobs: Jobs, prompt: str, **more) -> str:
    job = jobs.submit(PRESET.request(prompt=prompt, frames=9, steps=2), **more)
    jobs.wait(job)
    return job


def form(*actions, image=None, seconds=0.4, seed=5):
    return WorldForm(image=image, seconds=seconds, seed=seed, actions=actions)


def test_every_action_goes_on_from_the_same_frame_with_the_same_settings(served, jobs):
    source = jobs.submit(PRESET.request(prompt="a red star", frames=5, steps=3, height=448, width=256, guidance=1.5))
    seen = jobs.wait(source)
    requests = form("it grows", " ", None, "it shrinks").requests(served.engine, seen)
    assert [request.prompt for request in requests] == ["it grows", "it shrinks"]
    for request in requests:
        assert (request.height, request.width, request.steps, request.guidance) == (448, 256, 3, 1.5)
        assert (request.seed, request.frames) == (5, 9) and request.image == seen.folder / "last.png"


def test_a_picture_begins_with_the_size_of_its_shape(served, tmp_path):
    Image.new("RGB", (300, 520)).save(tmp_path / "tall.png")
    (request,) = form("it grows", image=str(tmp_path / "tall.png")).requests(served.engine, None)
    assert request.height > request.width and request.steps == PRESET.defaults.steps


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        ((), "No action is written down"),
        (("", "  "), "No action is written down"),
        (("a", "b", "c", "d", "e"), "at most 4"),
        (("a",), "nothing to go on from"),
    ],
)
def test_what_can_not_be_tried_is_refused_in_words(served, actions, words):
    with pytest.raises(RequestError, match=words):
        form(*actions).requests(served.engine, None)


@pytest.mark.parametrize("bad", ["y" * 20_001, "\udfff"])
def test_every_action_is_checked_before_any_is_queued(served, tmp_path, bad):
    Image.new("RGB", (448, 256)).save(tmp_path / "wide.png")
    with pytest.raises(RequestError, match="prompt"):
        form("it grows", bad, 5, image=str(tmp_path / "wide.png")).requests(served.engine, None)


def test_a_video_that_still_runs_is_nothing_to_go_on_from(served, jobs):
    served.engine.pace = Pace(step=0.2)
    job = jobs.submit(PRESET.request(prompt="a", frames=9))
    with pytest.raises(RequestError, match="no last frame yet"):
        form("it grows").requests(served.engine, jobs.snapshot(job))


def test_a_chain_is_served_as_one_video_and_its_last_frame_without_loss(served, jobs):
    first = make(jobs, "a")
    second = make(jobs, "b", parent=first)

    def get(path):
        return httpx.get(served.url + path)

    answer = get(f"/chain/{second}.mp4?download=1")
    assert answer.status_code == 200 and 'attachment; filename="b-' in answer.headers["content-disposition"]
    path = chain_file([jobs.snapshot(first), jobs.snapshot(second)])
    assert probe(path).frames == 17 and answer.content == path.read_bytes()
    assert get(f"/chain/{first}.mp4").content == jobs.snapshot(first).video.read_bytes()
    assert httpx.get(served.url + f"/chain/{second}.mp4", headers={"Range": "bytes=0-9"}).status_code == 206
    picture = get(f"/last/{second}.png")
    assert picture.status_code == 200 and picture.headers["content-type"] == "image/png"
    for path in ("/chain/nobody.mp4", "/last/nobody.png", "/last/..%2F..%2Fetc.png"):
        assert get(path).status_code == 404


def test_a_link_out_of_its_folder_is_not_followed(served, jobs, tmp_path):
    first = make(jobs, "a")
    second = make(jobs, "b", parent=first)
    secret = tmp_path / "secret"
    secret.write_text("not for visitors")
    own, before = (jobs.snapshot(job).folder for job in (second, first))
    chain = chain_file([jobs.snapshot(first), jobs.snapshot(second)])
    chain.unlink(missing_ok=True)
    for path, address in (
        (chain, f"chain/{second}.mp4"),
        (before / "video.mp4", f"chain/{second}.mp4"),
        (own / "video.mp4", f"video/{second}.mp4"),
        (own / "video.mp4", f"chain/{second}.mp4"),
        (own / "live.mp4", f"live/{second}.mp4"),
        (own / "thumbnail.jpg", f"thumbnail/{second}.jpg"),
        (own / "last.png", f"last/{second}.png"),
        (own / "preview.webp", f"preview/{second}.webp"),
    ):
        kept = path.read_bytes() if path.is_file() else b"as if"
        path.unlink(missing_ok=True)
        path.symlink_to(secret)
        answer = httpx.get(f"{served.url}/{address}")
        assert answer.status_code == 404 and "not for visitors" not in answer.text, address
        path.unlink()
        # A link within the folder is as good as the file.
        (path.parent / "aside").write_bytes(kept)
        path.symlink_to(path.parent / "aside")
        assert path == before / "video.mp4" or httpx.get(f"{served.url}/{address}").status_code == 200, address
        path.unlink()
        path.write_bytes(kept)


def test_what_was_seen_is_told_in_its_order_and_escaped(jobs):
    first = make(jobs, EVIL)
    second = make(jobs, "then that", parent=first)
    chain = [jobs.snapshot(first), jobs.snapshot(second)]
    html = show.story(chain, 24)
    assert "<script>" not in html and f'final="chain/{second}.mp4"' in html and 'frames="17"' in html
    assert html.index("alert") < html.index("then that")
    assert f'final="video/{first}.mp4"' in show.story(chain[:1], 24)
    assert "Begin with a picture" in Elements(show.story([], 24)).text


def test_candidates_come_in_their_places_and_then_in_step(served, jobs):
    group = "g1"
    made = [jobs.submit(PRESET.request(prompt=text, frames=9, steps=2), group=group) for text in (EVIL, "b")]
    for job in made:
        jobs.wait(job)
    states = jobs.of_group(group)
    assert [state.id for state in states] == made
    html = show.candidates(states, 24)
    assert "<script>" not in html and html.startswith(f'<video-grid videos="video/{made[0]}.mp4 video/{made[1]}.mp4"')
    states[1].status = "running"
    html = show.candidates(states, 24)
    assert html.count('class="cell"') == 2 and "<script>" not in html and "video-grid" not in html
    assert show.messages(states) == ""


def test_an_error_that_two_candidates_share_is_said_once(served, jobs):
    served.engine.pace = Pace(fail_at="denoise")
    states = [jobs.wait(jobs.submit(PRESET.request(prompt=text), group="g2")) for text in "ab"]
    assert show.messages(states).count("ran out of memory") == 1


# ---- the handlers of the tab


@pytest.fixture
def tab(served, jobs):
    """The tab, and the values of its fields as a page sends them."""
    with gr.Blocks() as demo:
        tab = WorldTab(served.engine, jobs)
        tab.build(demo)
    return tab


def values(tab, *actions, **place):
    blank = {tab.image: None, tab.seconds: 0.4, tab.seed: 5, tab.place: {"from": "", "group": ""} | place}
    return blank | dict.fromkeys((tab.seen, tab.story, tab.candidates, tab.messages), "") | texts(tab, actions)


def texts(tab, actions):
    return dict.fromkeys(tab.actions, "") | dict(zip(tab.actions, actions, strict=False))


def test_what_one_visitor_may_not_have_all_of_starts_nothing(served, jobs, tab, monkeypatch):
    source = make(jobs, "a red star")
    monkeypatch.setattr(jobs._admission, "limits", QueueLimits(at_once=3))
    monkeypatch.setattr(jobs, "_visitor", lambda: "1.2.3.4")
    served.engine.pace = Pace(step=0.2)
    before = len(jobs.recent())
    told = tab.start(values(tab, *"abcd", **{"from": source}))
    assert set(told) == {tab.plan} and "4 more are too many" in told[tab.plan]
    assert len(jobs.recent()) == before
    told = tab.start(values(tab, *"abc", **{"from": source}))
    assert [s.parent for s in jobs.of_group(told[tab.place]["group"])] == [source] * 3


def test_while_it_runs_it_can_not_be_started_again(served, jobs, tab):
    source = make(jobs, "a red star")
    served.engine.pace = Pace(step=0.2)
    told = tab.start(values(tab, "it grows", **{"from": source}))
    assert not told[tab.go].interactive and told[tab.stop].interactive
    (state,) = jobs.of_group(told[tab.place]["group"])
    jobs.cancel(state.id)
    jobs.wait(state.id)
    assert tab.look(values(tab, **told[tab.place]))[tab.go].interactive


def test_a_seed_that_is_none_is_refused_in_words(jobs, tab):
    source = make(jobs, "a red star")
    sent = values(tab, "it grows", **{"from": source}) | {tab.seed: tab.seed.preprocess(-5)}
    for told in (tab.tell_plan(sent), tab.start(sent)[tab.plan]):
        assert 'class="message error"' in told and "seed = -5" in told


@pytest.mark.parametrize("place", [{"from": EVIL}, {"group": EVIL}, {"from": "../x", "group": "None"}])
def test_an_address_that_names_nothing_known_says_so(tab, place):
    told = tab.look(values(tab, **place))
    assert "not known here" in told[tab.messages] and not [v for v in told.values() if "<script>" in str(v)]


def test_a_place_that_is_no_place_is_the_beginning(tab):
    for place in (None, "x", ["a"], 5):
        told = tab.look(values(tab) | {tab.place: place})
        assert "Look, act, look again" in told[tab.story] and tab.messages not in told


def test_nothing_has_begun_before_there_is_something_to_see(jobs, tab):
    assert tab.look(values(tab))[tab.begin].label == "Begin with"
    assert tab.look(values(tab, **{"from": make(jobs, "a")}))[tab.begin].label == "Begin elsewhere"


def test_the_plan_says_what_memory_it_needs(served):
    requests = [PRESET.request(prompt=text, frames=9) for text in "ab"]
    estimate = Estimate(1.0, 1.0, 0.0, "a test", bytes=3 * 2**30)
    assert "Needs about 3.0 GiB of memory" in Elements(show.plan(requests, 24, estimate)).text
    assert "memory" not in show.plan(requests, 24, dataclasses.replace(estimate, bytes=None))

"""What stands before every request: password, addresses of visitors, sizes, and the limits of the queue, over HTTP."""

import base64
import http.client
import time

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from engine.admission import Admission, QueueLimits
from engine.errors import BusyError
from engine.preset import load_preset
from engine.web import gate
from tests.double import Double, Pace, serve

PRESET = load_preset("tiny")
LOGIN = ("someone", "pa:ss wörd")
BASIC = base64.b64encode(":".join(LOGIN).encode()).decode()


# ---- the password


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    with serve(Double(PRESET), tmp_path_factory.mktemp("outputs"), login=LOGIN, metrics=True) as served:
        job = served.jobs.submit(PRESET.request(prompt="a", frames=5, steps=1))
        served.jobs.wait(job)
        yield served, job


def routes(job):
    return [
        "/", "/config", "/web/style.css", f"/video/{job}.mp4", f"/live/{job}.mp4", f"/thumbnail/{job}.jpg",
        f"/compare/{job}.json", "/gradio_api/info", "/gradio_api/startup-events", "/gradio_api/heartbeat/x",
        "/gradio_api/stream/a/b/1/playlist.m3u8", "/metrics", "/theme.css", "/assets/x",
        "/gradio_api/file=/etc/hostname", "/login", "/unknown",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "header", [None, "Basic " + base64.b64encode(b"someone:no").decode(), "Basic %%", "Bearer x", ""]
)
def test_nothing_but_the_health_checks_answers_without_the_password(guarded, header):
    served, job = guarded
    headers = {} if header is None else {"Authorization": header}
    for path in routes(job):
        answer = httpx.get(served.url + path, headers=headers)
        assert (answer.status_code, "Basic" in answer.headers["www-authenticate"]) == (401, True), path
    for path in ("/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/call/generate", "/login"):
        assert httpx.post(served.url + path, headers=headers, json={}).status_code == 401, path
    assert httpx.get(f"{served.url}/healthz", headers=headers).status_code == 200
    assert httpx.get(f"{served.url}/readyz", headers=headers).status_code in (200, 503)
    assert httpx.get(f"{served.url}/healthz/..", headers=headers).status_code in (401, 404)


def test_with_the_password_everything_is_as_usual(guarded):
    served, job = guarded
    headers = {"Authorization": f"Basic {BASIC}"}
    assert httpx.get(served.url, headers=headers).status_code == 200
    assert httpx.get(f"{served.url}/video/{job}.mp4", headers=headers).content[4:8] == b"ftyp"
    client = Client(served.url, headers=headers, verbose=False)
    path, stats = client.predict(prompt="a", seconds=0, steps=1, height=64, width=64, api_name="/generate")
    assert path.endswith(".mp4") and stats["frames"] == 1


# ---- sizes and addresses


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    with serve(Double(PRESET), tmp_path_factory.mktemp("outputs")) as served:
        yield served


def test_a_call_that_is_too_large_is_refused(served):
    url = f"{served.url}/gradio_api/call/generate"
    text = "a" * (gate.LARGEST_CALL + 1)
    assert httpx.post(url, json={"data": [text]}).status_code == 413
    pieces = (text[start : start + 2**16].encode() for start in range(0, len(text), 2**16))
    # No length is announced; a framework may have begun to read, and says it in its own way.
    assert httpx.post(url, content=pieces).status_code in (400, 413)
    assert httpx.get(f"{served.url}/healthz").status_code == 200


def test_an_upload_that_is_too_large_is_refused(served):
    # It is refused by what it announces, before a byte of it has come.
    connection = http.client.HTTPConnection("127.0.0.1", int(served.url.rsplit(":")[-1]))
    connection.putrequest("POST", "/gradio_api/upload")
    connection.putheader("Content-Length", str(200 * 2**20))
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def test_uploads_are_refused_once_they_fill_their_share_of_the_disk(served, tmp_path, monkeypatch):
    send = lambda: httpx.post(f"{served.url}/gradio_api/upload", files={"files": ("a.png", b"x" * 2000)})  # noqa: E731
    assert send().status_code == 200
    monkeypatch.setattr(gate, "GIB", 1)
    assert send().status_code == 507


@pytest.mark.parametrize(
    "path",
    [
        "/gradio_api/file=http://127.0.0.1:1/",
        "/gradio_api/file=https://169.254.169.254/latest/meta-data",
        "/gradio_api/file=HTTP://127.0.0.1:1/",
        "/gradio_api/file/http://127.0.0.1:1/",
        "/gradio_api/file=http:%2f%2f127.0.0.1:1/",
        "/gradio_api/file=file:///etc/passwd",
        "/gradio_api/file=ftp://127.0.0.1/",
        "/gradio_api/file=//127.0.0.1/x",
        "/gradio_api/proxy=http://127.0.0.1:1/",
        "/gradio_api/proxy=https://x.hf.space/",
        "/gradio_api/../gradio_api/file=/etc/passwd",
        "/gradio_api/file=/proc/self/environ",
        "/gradio_api/dev/reload",
        "/openapi.json",
    ],
)
def test_the_server_fetches_no_address_and_shows_no_file_of_its_own(served, path):
    answer = httpx.get(served.url + path)
    assert answer.status_code in (403, 404), answer.text[:200]
    assert "root:" not in answer.text


def test_a_link_in_the_outputs_folder_gives_nothing_away(served, tmp_path):
    (tmp_path / "secret.txt").write_text("secret")
    (served.jobs.outputs / "link.txt").symlink_to(tmp_path / "secret.txt")
    answer = httpx.get(f"{served.url}/gradio_api/file={served.jobs.outputs / 'link.txt'}")
    assert "secret" not in answer.text


# ---- limits


def submit(jobs, visitor=None):
    """Queue a job for a visitor, from outside of any page."""
    jobs._visitor, asked = lambda: visitor, jobs._visitor
    try:
        return jobs.submit(PRESET.request(prompt="a", frames=1, steps=5))
    finally:
        jobs._visitor = asked


@pytest.fixture
def slow(tmp_path):
    with serve(Double(PRESET, Pace(step=5)), tmp_path, max_queue=3, jobs_per_address=2, jobs_per_hour=3) as served:
        yield served


def call(served, forwarded=None):
    """Ask for a video, and wait until the server has taken it or refused; returns what it said."""
    headers = {} if forwarded is None else {"X-Forwarded-For": forwarded}
    address = f"{served.url}/gradio_api/call/generate"
    named = httpx.get(f"{served.url}/gradio_api/info").json()["named_endpoints"]["/generate"]["parameters"]
    asked = {"prompt": "a", "seconds": 0, "height": 64, "width": 64, "steps": 5}
    data = [asked.get(parameter["parameter_name"]) for parameter in named]
    event = httpx.post(address, json={"data": data}, headers=headers).json()["event_id"]
    with httpx.stream("GET", f"{address}/{event}", timeout=20) as lines:
        for line in lines.iter_lines():
            if line.startswith("data: ") and line != "data: null":
                return line
    raise AssertionError("the server said nothing")


def test_page_and_api_refuse_one_job_too_many_in_words(slow):
    submit(slow.jobs, "127.0.0.1"), submit(slow.jobs, "127.0.0.1")
    assert "2 jobs of yours waiting or running" in call(slow)
    # An address that a visitor writes in himself changes nothing.
    assert "2 jobs of yours waiting or running" in call(slow, "9.9.9.9")
    client = Client(slow.url, verbose=False)
    with pytest.raises(AppError, match="2 jobs of yours"):
        client.predict(prompt="a", api_name="/generate")


def click(served, label):
    """Press a button of the page as it opens, over HTTP; returns what the server changes."""
    config = httpx.get(f"{served.url}/config").json()
    parts = {part["id"]: part["props"] for part in config["components"]}
    button = next(number for number, props in parts.items() if props.get("value") == label)
    event = next(fn for fn in config["dependencies"] if [button, "click"] in fn["targets"] and fn["backend_fn"])
    data = [parts[number].get("value") for number in event["inputs"]]
    call = {"data": data, "fn_index": event["id"], "session_hash": "page"}
    return httpx.post(f"{served.url}/gradio_api/run/predict", json=call, timeout=30).text


@pytest.mark.parametrize("button", ["Generate", "Compare"])
def test_a_click_on_the_page_counts_for_its_visitor(slow, button):
    for _ in range(2):
        submit(slow.jobs, "127.0.0.1")
    assert "2 jobs of yours waiting or running" in click(slow, button)


def test_a_full_queue_is_full_for_all(slow):
    for _ in range(4):
        submit(slow.jobs)
        time.sleep(0.05)
    with pytest.raises(BusyError, match="There are 3 jobs in the queue, and no more are taken"):
        submit(slow.jobs)
    assert "There are 3 jobs in the queue" in call(slow)


def test_behind_a_proxy_the_address_that_it_saw_counts(tmp_path):
    with serve(Double(PRESET, Pace(step=5)), tmp_path, trusted_proxies=1, jobs_per_address=1) as served:
        submit(served.jobs, "1.1.1.1")
        assert "1 job of yours" in call(served, "1.1.1.1")
        assert "1 job of yours" in call(served, "2.2.2.2, 1.1.1.1")
        assert '"status": "' in call(served, "1.1.1.1, 2.2.2.2") or "queued" in call(served, "1.1.1.1, 3.3.3.3")


def test_jobs_of_an_hour_are_counted_for_each_client_alone():
    clock = [1000.0]
    admission = Admission(QueueLimits(waiting=0, per_hour=2), lambda: clock[0])
    for name in ("1", "2"):
        admission.check("a", set(), 0)
        admission.take("a", name)
        clock[0] += 600
    with pytest.raises(BusyError, match=r"started 2 jobs within an hour.*Try again in 41 min"):
        admission.check("a", set(), 0)
    admission.check("b", set(), 0)
    admission.check(None, set(), 10**6)
    clock[0] += 2401
    admission.check("a", set(), 0)


def test_what_is_remembered_of_clients_does_not_grow(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("engine.admission.REMEMBERED", 10)
    admission = Admission(clock=lambda: clock[0])
    for number in range(100):
        clock[0] += 1000
        admission.check(str(number), set(), 0)
        admission.take(str(number), f"job {number}")
    assert len(admission._taken) <= 11 and len(admission._owners) <= 1


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (QueueLimits(waiting=3), "There are 0 jobs in the queue, which takes 3; 4 more are too many"),
        (QueueLimits(at_once=3), "one visitor may have 3 here at once; 4 more are too many"),
        (QueueLimits(per_hour=3), "4 jobs are too many: one visitor may start 3 within an hour"),
    ],
)
def test_several_jobs_are_admitted_together_or_not_at_all(limits, words):
    admission = Admission(limits, lambda: 0.0)
    with pytest.raises(BusyError, match=words):
        admission.check("a", set(), 0, 4)
    admission.check("a", set(), 0, 3)


def test_several_jobs_wait_until_there_is_room_for_all_in_the_hour():
    clock = [0.0]
    admission = Admission(QueueLimits(per_hour=3), lambda: clock[0])
    for name in ("1", "2"):
        admission.take("a", name)
        clock[0] += 600
    with pytest.raises(BusyError, match=r"started 2 jobs.*3 more are too many.*try again in 51 min"):
        admission.check("a", set(), 0, 3)
    with pytest.raises(BusyError, match=r"2 more are too many.*try again in 41 min"):
        admission.check("a", set(), 0, 2)

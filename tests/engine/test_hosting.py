"""The server's settings, their table in the README, and the figures for Prometheus."""

import re
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

import app
from engine.errors import RequestError
from engine.preset import load_preset
from engine.telemetry import DeviceMemory, Memory
from engine.web.hosting import OTHERS, Hosting, table
from engine.web.metrics import Metrics
from tests.double import Double, Pace, serve

ROOT = Path(app.__file__).parent
PRESET = load_preset("tiny")


# ---- settings


def test_an_empty_environment_means_the_defaults():
    assert Hosting.read({}) == Hosting.read({"ENGINE_PUBLIC": "", "ENGINE_AUTH": "  "}) == Hosting()
    assert (Hosting().host, Hosting().port, Hosting().outputs) == ("127.0.0.1", 7860, Path("outputs"))


def test_what_a_command_line_says_comes_first():
    found = Hosting.read({"GRADIO_SERVER_PORT": "9", "ENGINE_OUTPUTS": "/o"}, port=8, outputs=None)
    assert (found.port, found.outputs) == (8, Path("/o"))


def test_where_strangers_come_the_limits_are_tighter_unless_they_are_set():
    found = Hosting.read({"ENGINE_PUBLIC": "1", "ENGINE_JOBS_PER_HOUR": "7"})
    limits = found.queue_limits()
    assert (limits.waiting, limits.at_once, limits.per_hour, found.uploads_gib) == (20, 5, 7, 4)
    assert Hosting.read({"ENGINE_PUBLIC": "yes", "ENGINE_JOBS_PER_ADDRESS": "0"}).jobs_per_address == 0


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("ENGINE_PUBLIC", "maybe", "'maybe' must be 1 or 0"),
        ("ENGINE_MAX_QUEUE", "0", "'0' must be a whole number from 1 to 10000"),
        ("ENGINE_MAX_QUEUE", "-3", "'-3' must be a whole number"),
        ("ENGINE_MAX_QUEUE", "1e3", "'1e3' must be a whole number"),
        ("ENGINE_MAX_QUEUE", "9" * 5000, "must be a whole number"),
        ("ENGINE_MAX_QUEUE", "٣", "must be a whole number"),
        ("GRADIO_SERVER_PORT", "70000", "whole number from 1 to 65535"),
        ("ENGINE_GUARDRAIL", "yes", "must be one of auto, on, off"),
        ("ENGINE_AUTH", "/no/such/file", 'must be "user:password" or a file'),
        ("ENGINE_AUTH", "user:", "neither of them empty"),
        ("ENGINE_AUTH", ":secret", "neither of them empty"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named(name, value, words):
    with pytest.raises(RequestError, match=f"The environment variable {name}") as refused:
        Hosting.read({name: value})
    assert words in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_password_may_come_from_a_file(tmp_path):
    (tmp_path / "login").write_text("a:b:c\n")
    assert Hosting.read({"ENGINE_AUTH": str(tmp_path / "login")}).login == ("a", "b:c")
    assert Hosting.read({"ENGINE_AUTH": "a:b"}).login == ("a", "b")
    (tmp_path / "login").write_text("a:b\nc:d\n")
    with pytest.raises(RequestError, match="user:password"):
        Hosting.read({"ENGINE_AUTH": str(tmp_path / "login")})


def test_the_readme_has_the_table_of_the_code():
    assert table() in (ROOT / "README.md").read_text(encoding="utf-8"), "python -m engine.web.hosting prints it"


OURS = r"""["'`(\s]((?:ENGINE|KERNELS|GRADIO|SPACES)_[A-Z0-9_]*[A-Z0-9])\b"""
NAMED = re.compile(OURS + r"""|(?:environ(?:\.get)?|getenv)[\[(]"(\w+)""")


def variables(path):
    """Names of environment variables in a file: those that it reads, and those that look like ours."""
    return {ours or read for ours, read in NAMED.findall(path.read_text(encoding="utf-8"))} - {"HOME"}


def test_every_variable_that_the_code_reads_stands_in_the_table():
    sources = [ROOT / "app.py", *(ROOT / "engine").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]
    used = {name: path for path in sources for name in variables(path)}
    known = {name.strip("`") for name in re.findall(r"^\| (`[A-Z_0-9]+`) \|", table(), re.MULTILINE)}
    assert {name: str(path) for name, path in used.items() if name not in known} == {}, "name it in hosting.py"
    assert known - set(OTHERS) <= set(used)
    assert {"ENGINE_AUTH", "ENGINE_PRESET", "GRADIO_SERVER_PORT"} <= set(used)


# ---- metrics


def samples(text):
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_count_jobs_frames_and_seconds(tmp_path):
    with serve(Double(PRESET, Pace(step=0.01)), tmp_path, metrics=True) as served:
        submit = lambda: served.jobs.submit(PRESET.request(prompt="a", frames=5, steps=2))  # noqa: E731
        assert served.jobs.wait(submit()).status == "finished"
        served.engine.pace = Pace(fail_at="text")
        assert served.jobs.wait(submit()).status == "failed"
        served.engine.pace = Pace(step=5)
        running, waiting = submit(), submit()
        served.jobs.cancel(waiting)
        next(state for state in served.jobs.follow(running, 0.01) if state.status == "running")
        last = submit()
        answer = httpx.get(f"{served.url}/metrics")
        assert answer.headers["content-type"].startswith("text/plain")
        found = samples(answer.text)
        for job in (running, last):
            served.jobs.cancel(job)
    assert found["jobs_total", ("kind", "video"), ("outcome", "finished")] == 1
    assert found["jobs_total", ("kind", "video"), ("outcome", "failed")] == 1
    assert found["jobs_total", ("kind", "video"), ("outcome", "stopped")] == 1
    assert found["frames_total",] == 5
    assert found["stage_seconds_count", ("stage", "denoise")] == 1
    assert found["stage_seconds_sum", ("stage", "denoise")] > 0
    assert (found["jobs_running",], found["jobs_waiting",]) == (1, 1)
    assert found["process_memory_bytes",] > 2**20


def test_metrics_name_every_device(tmp_path):
    device = DeviceMemory("cuda:1", 1, 2, 3, 4, 5)
    jobs = type("Jobs", (), {"on_end": [], "running": 0, "waiting": 0})()
    metrics = Metrics(jobs, lambda: Memory(6, 7, 8, (device,)))
    families = [family for family in metrics.registry.collect() if family.name == "device_memory_bytes"]
    found = {sample.labels["what"]: sample.value for family in families for sample in family.samples}
    assert found == {"allocated": 1, "reserved": 2, "peak": 3, "used": 4, "total": 5}


def test_there_are_no_metrics_unless_they_are_asked_for(tmp_path):
    with serve(Double(PRESET), tmp_path) as served:
        assert httpx.get(f"{served.url}/metrics").status_code == 404

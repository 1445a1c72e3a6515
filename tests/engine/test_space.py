"""Containers and Spaces: what they are told is what the project says."""

import re
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from engine.web import space
from engine.web.hosting import table

ROOT = Path(space.__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def head(text):
    """The lines at the head of a README as a table."""
    lines = text.split("---\n")[1].splitlines()
    return {key: value.strip(' "') for key, _, value in (line.partition(":") for line in lines)}


def test_a_gradio_space_installs_what_the_project_says(tmp_path):
    space.write(tmp_path)
    wanted = [Requirement(line) for line in (tmp_path / "requirements.txt").read_text().splitlines()]
    own = [Requirement(line) for line in PROJECT["dependencies"]]
    assert wanted == own


def test_a_gradio_space_has_a_head_that_fits_the_project(tmp_path):
    space.write(tmp_path)
    found, docker = head((tmp_path / "README.md").read_text()), head((ROOT / "README.md").read_text())
    assert (found["sdk"], docker["sdk"]) == ("gradio", "docker") and "app_port" not in found
    assert found["python_version"] in SpecifierSet(PROJECT["requires-python"])
    gradio = next(Requirement(line) for line in PROJECT["dependencies"] if line.startswith("gradio"))
    assert found["sdk_version"] == metadata.version("gradio") and found["sdk_version"] in gradio.specifier
    assert (ROOT / found["app_file"]).is_file()
    same = set(docker) - {"sdk", "app_port"}
    assert {key: found[key] for key in same} == {key: docker[key] for key in same}


def test_the_container_has_all_parts_and_only_known_variables():
    text = (ROOT / "Dockerfile").read_text()
    copied = set(re.findall(r"^COPY --chown=user (.+) \S+$", text, re.MULTILINE))
    for name in (" ".join(copied)).split():
        assert (ROOT / name).exists(), name
    packages = {"app.py", "engine", "kernels", "presets", "pyproject.toml", "README.md", "LICENSE"}
    assert set(" ".join(copied).split()) == packages
    known = set(re.findall(r"`([A-Z][A-Z_0-9]+)`", table())) | {"PATH", "PYTHONUNBUFFERED"}
    assert set(re.findall(r"^\s+([A-Z_]+)=|^ENV ([A-Z_]+)=", text, re.MULTILINE)) <= {(n, "") for n in known} | {
        ("", n) for n in known
    }


def test_the_container_runs_as_nobody_special():
    text = (ROOT / "Dockerfile").read_text()
    assert "--uid 1000" in text and re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000"]
    assert "EXPOSE 7860" in text and "/healthz" in text
    assert head((ROOT / "README.md").read_text())["app_port"] == "7860"

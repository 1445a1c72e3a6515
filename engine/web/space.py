"""What a Hugging Face Space with the Gradio SDK needs besides the project: `python -m engine.web.space FOLDER`.

A Space of the Docker SDK takes the repository as it is. One of the Gradio SDK installs a `requirements.txt` before the
project is there, and reads other lines at the head of the README. Both are written from pyproject.toml, so that they
can't say something else.
"""

from __future__ import annotations

import argparse
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PYTHON = "3.12"
DOCKER = ("sdk: docker", "app_port: 7860")


def requirements() -> str:
    """requirements.txt: the project's dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return "\n".join(project["dependencies"]) + "\n"


def readme() -> str:
    """The README with the head of a Space of the Gradio SDK."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    gradio = ("sdk: gradio", f"sdk_version: {metadata.version('gradio')}", f'python_version: "{PYTHON}"')
    return text.replace("\n".join(DOCKER), "\n".join([*gradio, "app_file: app.py"]), 1)


def write(folder: Path) -> None:
    """Write both files into a folder, a copy of the repository."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "requirements.txt").write_text(requirements(), encoding="utf-8")
    (folder / "README.md").write_text(readme(), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m engine.web.space", description=write.__doc__)
    parser.add_argument("folder", type=Path, help="a copy of the repository, which becomes a Space of the Gradio SDK")
    write(parser.parse_args().folder)

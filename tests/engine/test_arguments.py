"""Bad input of every command line: one line, exit code 2, and nothing begun."""

import io
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import app
from engine import __main__ as command
from engine import arguments, fidelity, rehearse, spread_bench
from engine.errors import CheckpointError, RequestError, ResourceError
from engine.preset import preset_from_environment
from kernels import kernel_bench
from kernels.vae_decode import bench
from presets.tiny import export

PROGRAMS = [
    (rehearse.main, ["--small", "--steps", "0"], "steps at least 1"),
    (rehearse.main, ["--small", "--frames", "7"], "4n + 1"),
    (fidelity.main, ["--preset", "nonsense"], "nonsense"),
    (fidelity.main, ["--steps", "0"], "steps = 0"),
    (spread_bench.main, ["--devices", "nonsense"], "nonsense"),
    (spread_bench.main, ["--devices", "cpu", "--repeats", "0"], "from 1 on"),
    (spread_bench.main, ["--devices", "cpu", "--out", "/proc/x/figures.json"], "/proc/x"),
    (bench.main, ["--frames", "abc"], "4n + 1"),
    (bench.main, ["--frames", "9", "--height", "33"], "multiples of 16"),
    (bench.main, ["--weights", "/nonsense"], "config.json"),
    (bench.main, ["--repeat", "0"], "from 1 on"),
    (lambda given: kernel_bench.main("modulate", None, None, given), ["--tokens", "-5"], "from 1 on"),
    (command.main, ["compare", "--keep", "/etc/passwd"], "--keep /etc/passwd can't be written"),
    (command.main, ["compare", "--keep", "/proc/x"], "--keep /proc/x can't be written"),
]


def code_of(main, given):
    try:
        return main(given)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(("main", "given", "words"), PROGRAMS)
def test_bad_input_is_one_line_and_exit_code_2(capsys, main, given, words):
    assert code_of(main, given) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said
    # argparse says first how a program is called.
    assert "usage" in said or said.count("\n") == 1


def test_a_failure_that_is_no_bad_input_has_another_code(capsys):
    with pytest.raises(SystemExit) as end, arguments.in_one_line():
        raise CheckpointError("there is none")
    assert end.value.code == 1 and capsys.readouterr().err == "CheckpointError: there is none\n"


def test_an_export_without_a_source_is_said(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["export", "/nonsense"])
    assert code_of(lambda _: export.main(), None) == 2 and "/nonsense holds no" in capsys.readouterr().err


def test_a_result_is_told_where_letters_are_missing(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    arguments.tell("a \u2603")
    assert raw.getvalue() == b"a \\u2603\n"


def test_a_reader_that_has_gone_changes_nothing():
    code = "from engine.arguments import tell; tell('x' * 100000)"
    out, into = os.pipe()
    os.close(out)
    done = subprocess.run([sys.executable, "-c", code], stdout=into, stderr=subprocess.PIPE, check=False)
    os.close(into)
    assert done.returncode == 0 and done.stderr == b""


def test_json_is_plain_ascii(monkeypatch, tmp_path, capsys):
    stats = {"prompt": "a \u2603", "partial": False}
    monkeypatch.setattr(command, "generate", lambda *_: stats)
    assert command.main(["a", "--json", "--out", str(tmp_path / "a.mp4")]) == 0
    out = capsys.readouterr().out
    assert out.isascii() and json.loads(out) == stats


def test_a_preset_of_blanks_is_none_at_all(monkeypatch):
    monkeypatch.setenv("ENGINE_PRESET", "  ")
    monkeypatch.setenv("ENGINE_CHECKPOINT", " ")
    assert preset_from_environment().name == "tiny"


@pytest.mark.parametrize("host", ["nonsense.invalid", "x" * 70])
def test_an_address_that_is_none_is_said_with_its_variable(host):
    with pytest.raises(ResourceError, match="GRADIO_SERVER_NAME"):
        app._listen(SimpleNamespace(host=host, port=7860))


def test_a_port_that_is_taken_is_said():
    with app._listen(SimpleNamespace(host="127.0.0.1", port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port}.*GRADIO_SERVER_PORT"):
            app._listen(SimpleNamespace(host="127.0.0.1", port=port))


def test_uploads_without_a_folder_are_refused_by_their_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("GRADIO_TEMP_DIR", "/dev/null/x")
    with pytest.raises(RequestError, match="GRADIO_TEMP_DIR"):
        app._outputs(tmp_path)

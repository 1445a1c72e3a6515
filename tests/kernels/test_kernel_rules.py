"""Rules of device code that can be checked without a device."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "kernels").rglob("*.py"))
DEVICE_CODE = [path for path in SOURCES if "\nimport triton\n" in path.read_text(encoding="utf-8")]


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == name]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_program_numbers_are_64_bits_wide_where_they_are_read(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    widened = [c for c in ast.walk(tree) if isinstance(c, ast.Call) and ast.unparse(c).endswith(".to(tl.int64)")]
    inside = [read for call in widened for read in calls(call, "tl.program_id")]
    assert len(calls(tree, "tl.program_id")) == len(inside)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_autotuner_and_one_place_for_launches(path):
    """An autotuner would time candidates during a request; a launch elsewhere could start on the wrong GPU."""
    text = path.read_text(encoding="utf-8")
    assert "autotune" not in text
    started = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and "kernel" in ast.unparse(node.func)
    ]
    assert not started or path.name == "launch.py"


def test_everything_but_device_code_imports_without_triton():
    others = [path for path in SOURCES if path not in DEVICE_CODE]
    assert DEVICE_CODE and others
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in others]
    names = [name.removesuffix(".__init__") for name in names if not name.endswith("__main__")]
    code = "import sys, importlib\nsys.modules['triton'] = None\n"
    code += (
        f"for name in {names!r}: importlib.import_module(name)\nimport torch\nassert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, env={"CUDA_VISIBLE_DEVICES": "", "PATH": ""})


def test_another_size_of_video_compiles_no_kernel():
    """A request would wait for it: most of a second for each of twenty, when it was so."""
    pytest.importorskip("triton")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests/kernels/decoder_variants.py")]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    first, *others = json.loads(result.stdout.splitlines()[-1]).values()
    assert 10 < first < 30 and len(others) == 5 and not any(others), result.stdout


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_compile_and_move_sixteen_bytes_at_a_time(tmp_path, capability):
    """For GPUs that are not here: every value goes out in 16-byte stores and nothing spills to local memory."""
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests/kernels/compile_kernels.py"), str(capability)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == 8
    for name, counts in found.items():
        # What goes out in fp8 is half as wide, and its scales are single values.
        assert "fp8" in name or counts["stores"] == counts["wide stores"] > 0, name
        assert counts["wide loads"] >= 4 and counts["local"] == 0, name

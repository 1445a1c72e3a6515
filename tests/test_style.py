"""The size budget of the code, counted: short functions, short files, no random numbers outside noise.py."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [ROOT / "app.py", *sorted((ROOT / "engine").rglob("*.py")), *sorted((ROOT / "kernels").rglob("*.py"))]
ALL = [*SOURCES, *sorted((ROOT / "presets").rglob("*.py"))]


def functions(path: Path) -> list[tuple[str, int]]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [(node.name, node.end_lineno - node.lineno + 1) for node in ast.walk(tree) if isinstance(node, kinds)]


@pytest.mark.parametrize("path", ALL, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_functions_are_short(path):
    assert path.read_text(encoding="utf-8").count("\n") <= 400
    too_long = [(name, lines) for name, lines in functions(path) if lines > 80]
    assert not too_long


def test_the_median_function_is_short():
    lengths = sorted(lines for path in SOURCES for _, lines in functions(path))
    assert lengths[len(lengths) // 2] <= 12
    assert lengths[int(len(lengths) * 0.9)] <= 45


RANDOM = ("rand", "randn", "randint", "rand_like", "randn_like", "normal_", "manual_seed")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_random_numbers_come_from_noise_alone(path):
    if path.name == "noise.py":
        return
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Initialisation of a fresh model draws numbers too, but never those of a video.
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)]
    torch_calls = [call for call in calls if isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"]
    assert not [call.lineno for call in torch_calls if call.func.attr in RANDOM]

"""Elements beyond 2^31, which 32-bit offsets would look for elsewhere, and kernels that compile for a GPU."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import kernels.vae_decode as package

pytest.importorskip("triton")
from kernels.vae_decode import passes, reference

FAR = 2**30 + 64  # frames that are so far apart: the third begins beyond 2^31
SOURCES = [Path(package.__file__).with_name(name) for name in ("device.py", "passes.py", "tile_passes.py")]
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")


def far(frames, *shape):
    """[frames, ...] of fp16 whose frames lie FAR apart. The memory between is never touched, so it costs nothing."""
    memory = torch.empty((frames - 1) * FAR + torch.Size(shape).numel(), dtype=torch.float16)
    tensor = memory.as_strided((frames, *shape), (FAR, *torch.empty(shape).stride()))
    return tensor.copy_(torch.randn(frames, *shape))


@pytest.fixture(autouse=True)
def enough_room():
    """Nothing of it is used, but a system that promises no memory it does not have refuses it."""
    try:
        torch.empty(5 * FAR, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("this system has no 10 GiB of address space to give")


def agree(name, out, *arguments):
    wanted, got = torch.empty(out.shape, dtype=out.dtype), out
    getattr(reference, name)(wanted, *[a.clone() if isinstance(a, torch.Tensor) else a for a in arguments])
    getattr(passes, name)(got, *arguments)
    assert torch.allclose(got.float(), wanted.float(), atol=0.02, rtol=0.01)


@pytest.mark.parametrize("side", ["input", "output"])
def test_frames_far_apart(side):
    x = far(4, 2, 3, 8) if side == "input" else torch.randn(4, 2, 3, 8).half()
    out = far(6, 2, 3, 8)[:] if side == "output" else torch.empty(6, 2, 3, 8).half()
    agree("write_frames", out, x, torch.ones(8), None, torch.randn(2, 2, 3, 8).half())


@pytest.mark.parametrize("phases", [6, 36])
def test_tiles_far_apart(phases):
    columns = 3 if phases == 6 else 1
    agree("write_tiles", torch.empty(phases, 1, 2, columns, 8).half(), far(4, 2, 3, 8))
    products = torch.randn(phases, 1, 2, columns, 8).half()
    agree("write_outputs", far(4, 2, 3, 8), products, torch.ones(8), far(4, 2, 3, 8))


def test_phases_far_apart():
    agree("write_tiles", far(6, 1, 2, 3, 8), torch.randn(4, 2, 3, 8).half())


def test_sums_pictures_and_planes_far_apart():
    agree("add", far(4, 2, 3, 8), far(4, 2, 3, 8), torch.ones(8), far(4, 2, 3, 8))
    agree("enlarge", far(4, 4, 6, 8), far(4, 3, 4, 32), torch.ones(8), far(4, 2, 3, 8))
    finite = torch.ones(1, dtype=torch.int32)
    agree("stencil", torch.empty(4, 2, 3, 12), far(4, 4, 3, 112), torch.ones(12), finite)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_program_ids_are_widened_where_they_are_read(source):
    tree = ast.parse(source.read_text(encoding="utf-8"))
    widened = {
        id(node.func.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "to"
        and ast.unparse(node.args[0]) == "tl.int64"
    }  # fmt: skip
    ids = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.program_id"]
    assert all(id(node) in widened for node in ids)
    assert "autotune" not in source.read_text(encoding="utf-8")


COMPILE = """
import sys, warnings
warnings.filterwarnings("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kernels.vae_decode import passes, tile_passes
wide, flags = dict(C=1024, BLOCK=1024, P=1), dict(NORM=True, BIAS=True)
half, sums = dict(C=512, BLOCK=512, P=2), dict(BIAS=True, RESIDUAL=True)
tile = tile_passes._sizes(1024)
kernels = [
    (passes._frames, wide | flags),
    (passes._add, wide | sums),
    (passes._enlarge, half | dict(STRIDE=2)),
    (passes._stencil, dict(S=112, BLOCK=64, PIXELS=True)),
    (tile_passes._tiles, tile),
    (tile_passes._wide_tiles, tile),
    (tile_passes._frames_of, tile | sums),
    (tile_passes._wide_frames_of, tile | sums),
]
data = {"out", "x", "history", "products", "residual", "y", "z", "source", "values", "frames"}
for kernel, constants in kernels:
    types = {name: "*fp16" if name in data else "i32" for name in kernel.arg_names}
    types |= dict.fromkeys(constants, "constexpr")
    types |= {name: "*fp32" for name in ("gain", "bias") if name in types}
    if kernel is passes._stencil:
        types |= dict(finite="*i32", out="*u8")
    made = triton.compile(ASTSource(kernel, types, constexprs=constants), target=GPUTarget("cuda", 90, 32))
    assert ".local" not in made.asm["ptx"] and made.asm["cubin"]
print("compiled", len(kernels))
"""


def test_every_pass_compiles_for_a_gpu_that_is_not_here(tmp_path):
    """For sm_90; compiled, not run. Nothing goes to local memory."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "compiled 8" in done.stdout, done.stderr[-3000:]

"""A kernel's assertion on a real GPU: the video is cut short and kept, and everything after it is refused in words.

In a process of its own, whose context it costs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("transformers")
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
PROGRAM = """
import sys
from pathlib import Path
import torch
from engine import broken
from engine import engine as engine_module
from engine.engine import Engine
from engine.errors import BrokenError
from engine.events import VideoFinished
from engine.preset import load_preset
from tests.gpu.test_app_cuda import Unwritten

engine_module.VideoWriter = Unwritten
engine = Engine(load_preset("tiny"), "cuda:0", measured=False)
request = engine.preset.request(height=128, width=224, frames=17, steps=2, seed=5)
engine.load(request.denoise)
decode = engine.executor.decode

def breaks(*arguments):
    parts = decode(*arguments)
    yield next(parts)
    torch.zeros(1, device="cuda")[torch.tensor([7], device="cuda")]
    yield from parts

engine.executor.decode = breaks
folder, seen = Path(sys.argv[1]), []
try:
    for event in engine.generate(request, folder):
        seen.append(event)
except BrokenError as error:
    print("told:", error)
assert isinstance(seen[-1], VideoFinished) and seen[-1].partial, seen[-1]
assert (folder / "latents.safetensors").exists()
print("ready:", engine.readiness())
try:
    next(engine.generate(request, folder / "again"))
except BrokenError as error:
    print("refused:", error)
print("memory:", engine.memory().devices)
engine.close()
print("closed")
broken.leave(0)
"""


def test_an_assertion_in_a_kernel_costs_the_process_and_nothing_else(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    print(ended.stdout)
    told = ("told: cuda:0 met a fault", "ready: Readiness(state='failed'", "refused: cuda:0", "memory: ()", "closed")
    assert all(word in ended.stdout for word in told), ended.stdout + ended.stderr[-4000:]

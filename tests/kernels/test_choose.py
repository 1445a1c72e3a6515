from types import SimpleNamespace

import pytest
import torch

import kernels
from engine.decode_paths import explain
from engine.errors import RequestError
from engine.fused import choose_fused
from engine.settings import DecodeSettings
from kernels import checks, launch
from kernels.choose import Choice, Path, choose

PATHS = (
    Path("built", "compiled for this GPU", lack="nvcc is missing"),
    Path("portable", "Triton passes", held_back="not tested yet"),
    Path("plain", "PyTorch operations"),
    Path("reference", "the truth"),
)


def test_auto_takes_the_first_that_runs_and_says_what_was_passed_over():
    choice = choose("decode", PATHS)
    assert choice == Choice("decode", "plain", choice.reason)
    assert choice.reason == "PyTorch operations; not built: nvcc is missing; not portable: not tested yet"


def test_a_name_wins_also_over_being_held_back():
    assert choose("decode", PATHS, "reference") == ("decode", "reference", "the truth, as asked for")
    choice = choose("decode", PATHS, "portable")
    assert choice.path == "portable" and "not tested yet" in choice.reason


@pytest.mark.parametrize(
    "wanted, words",
    [("built", ["'built'", "nvcc is missing", "portable, plain, reference"]), ("fast", ["'fast'", "auto, built"])],
)
def test_what_is_absent_is_refused_with_what_there_is(wanted, words):
    with pytest.raises(RequestError) as refusal:
        choose("decode", PATHS, wanted)
    assert all(word in str(refusal.value) for word in words)


def test_nothing_left_is_an_error_with_every_reason():
    with pytest.raises(RequestError, match=r"built: nvcc is missing; portable: not tested yet"):
        choose("decode", PATHS[:2])


# ---- whether Triton runs


def test_kernels_are_for_cuda_tensors_alone_whatever_the_environment_says(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    for value in ("1", "true"):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert "NVIDIA GPU" in launch.lack(cpu)
        assert launch.lack(cuda)
    monkeypatch.setattr(launch, "installed", lambda: True)
    assert "TRITON_INTERPRET" in launch.lack(cuda)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert launch.lack(cuda) is None
    monkeypatch.setattr(launch, "installed", lambda: False)
    assert "not installed" in launch.lack(cuda)


def test_a_machine_on_which_no_kernel_starts_says_so_after_a_trial(monkeypatch):
    """PyTorch brings Triton, but not the C compiler and the headers that Triton's launcher is compiled with."""
    cuda, trial = torch.device("cuda:0"), SimpleNamespace()

    def fail(device):
        raise RuntimeError("Failed to find C compiler.\nSet CC.")

    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(launch, "installed", lambda: True)
    monkeypatch.setattr(launch, "_faults", {})
    monkeypatch.setattr(kernels, "trial", trial, raising=False)
    trial.run = fail
    assert launch.lack(cuda) is None
    launch.try_out(cuda)
    assert launch.lack(cuda).endswith("Python's headers (RuntimeError: Failed to find C compiler.)")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert explain(DecodeSettings(), cuda).path == "plain"
    assert choose_fused("auto", cuda).path == "off"

    monkeypatch.setattr(launch, "_faults", {})
    trial.run = lambda device: device == cuda
    launch.try_out(cuda)
    assert launch.lack(cuda) is None


def test_the_kernel_of_the_trial_runs(device):
    from kernels import trial

    assert trial.run(device)


# ---- checks


def test_checks_name_value_and_rule():
    x = torch.zeros(2, 3, 4)
    checks.check_shape("x", x, [2, -1, 4], [4])
    with pytest.raises(ValueError, match=r"x has shape \[2, 3, 4\], it must be \[2, 'any', 5\] or \[4\]"):
        checks.check_shape("x", x, [2, -1, 5], [4])
    with pytest.raises(ValueError, match=r"empty has shape \[2, 0\]"):
        checks.check_shape("empty", torch.zeros(2, 0), [2, -1])
    with pytest.raises(ValueError, match=r"x is torch.float64, it must be torch.float32"):
        checks.check_dtype("x", x.double(), *checks.FLOATS)
    with pytest.raises(ValueError, match=r"y is on meta, it must be on cpu"):
        checks.check_device(x.device, x=x, nothing=None, y=torch.zeros(1, device="meta"))
    with pytest.raises(ValueError, match=r"y has stride 4 in its last dimension"):
        checks.check_inner_stride(x=x[:, ::2], nothing=None, y=x.transpose(1, 2))
    checks.check_inner_stride(x=x[..., ::5])

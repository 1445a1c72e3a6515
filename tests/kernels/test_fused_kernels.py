"""The whole transformer with its Triton kernels: in the interpreter on small models, on a GPU where there is one."""

import pytest
import torch

from engine.attention import Shape
from engine.errors import RequestError
from engine.fused import choose_fused, fault
from engine.mmdit import PAN2Transformer3DModel
from kernels import launch
from tests.engine.golden_case import TF_CASES, Case, assert_near, random_inputs


@pytest.fixture
def started(monkeypatch):
    """Names of the kernels that were started."""
    names, start = [], launch.launch

    def counted(kernel, *arguments, **constants):
        names.append(kernel.fn.__name__)
        start(kernel, *arguments, **constants)

    for module in ("kernels.modulate.kernel", "kernels.qk_norm_rope.kernel"):
        monkeypatch.setattr(f"{module}.launch", counted)
    return names


def fused(case, device, dtype=torch.float32) -> PAN2Transformer3DModel:
    model = case.model().requires_grad_(False).cast(dtype).to(device)
    model.set_fused_kernels(True)
    return model


@pytest.fixture(autouse=True)
def exact_products():
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.mark.parametrize("name", TF_CASES)
def test_golden(device, started, name):
    case = Case(name)
    model = fused(case, device)
    output = model(*(value.to(device) for value in case.inputs)).cpu()
    slack = 5 if device.type == "cuda" else 1  # other sums than on the host
    assert_near(output, case["output_exact"], max_abs=slack * 2e-5, rel_l2=slack * 2e-6)
    blocks = model.config.num_layers
    assert started.count("qk_norm_rope_kernel") == blocks
    # For each stream one before the blocks and two in each, but for the text of the last block.
    assert started.count("modulate_kernel") == 2 + 4 * blocks - 2


def test_bf16_is_within_twice_what_bf16_costs(device):
    case = Case("tf_hd128")
    output = fused(case, device, torch.bfloat16)(*(value.to(device) for value in case.inputs)).cpu()
    truth = case["output_exact"].double()
    error, plain = ((value.double() - truth).norm() for value in (output, case["output_bf16_run"]))
    assert error <= 2 * plain


def test_fused_and_plain_velocities_are_near_for_a_batch_with_odd_counts(device):
    model = fused(Case("tf_batch2"), device)
    latents, condition, text = (t.to(device) for t in random_inputs(model, 2, 3, 6, 10, tokens=7))
    prepared = model.prepare(text, condition, [0.9, 0.0])
    found = model.velocity(latents, 0, prepared)
    model.set_fused_kernels(False)
    assert_near(found.cpu(), model.velocity(latents, 0, prepared).cpu(), max_abs=1e-5, rel_l2=2e-6)


def test_two_sizes_and_the_first_again_give_the_same_bytes(device):
    model = fused(Case("tf_base"), device, torch.bfloat16)
    first = [t.to(device) for t in random_inputs(model)]
    second = [t.to(device) for t in random_inputs(model, 2, 1, 8, 4, tokens=2)]

    def run(latents, condition, text):
        return model.velocity(latents, 1, model.prepare(text, condition, [1.0, 0.5]))

    before = run(*first)
    run(*second)
    assert torch.equal(run(*first), before)


SHAPE = Shape(torch.bfloat16, heads=3, head_size=8)


@pytest.fixture
def untried():
    fault.cache_clear()
    yield
    fault.cache_clear()


def test_kernels_that_are_right_pass_their_trial(device, untried, started):
    assert choose_fused("auto", device, SHAPE) == ("fused_kernels", "on", "fused Triton kernels")
    assert sorted(started) == ["modulate_kernel", "modulate_kernel", "qk_norm_rope_kernel"]
    assert choose_fused("on", device, SHAPE).path == "on" and len(started) == 3


def no_compiler(*arguments, **options):
    raise RuntimeError("Failed to find C compiler.\nPlease specify via CC.")


def zeros(x, out, *arguments, **options):
    out.zero_()


@pytest.mark.parametrize(
    "run, words",
    [
        (no_compiler, "failed their trial: RuntimeError: Failed to find C compiler"),
        (zeros, "wrong values: modulate by 1.0"),
    ],
)
def test_kernels_that_fail_their_trial_are_passed_over_with_the_reason(device, untried, monkeypatch, run, words):
    monkeypatch.setattr("kernels.modulate.kernel.run", run)
    choice = choose_fused("auto", device, SHAPE)
    assert choice.path == "off" and words in choice.reason
    with pytest.raises(RequestError, match=words):
        choose_fused("on", device, SHAPE)
    assert choose_fused("off", device, SHAPE).path == "off"


def test_kernels_that_nobody_wants_are_not_started(device, untried, started):
    choose_fused("off", device, SHAPE)
    assert not started

"""The blocks in few passes: the same video as the plain definition, with PyTorch operations in place of the kernels.

The kernels themselves, in the interpreter or on a GPU, are in tests/kernels/test_fused_kernels.py."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from golden_case import BF16, TF_CASES, Case, assert_near, random_inputs, split

from engine import fused, layers
from engine.errors import RequestError
from engine.fp8 import convert
from engine.mmdit import PAN2Transformer3DModel
from engine.offload import BlockStream
from engine.step_cache import Policy, StepCache
from kernels import launch

MAX_ABS, REL_L2 = 2e-5, 2e-6


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def fused_model(case):
    model = case.model().requires_grad_(False)
    model.set_fused_kernels(True)
    return model


@pytest.mark.parametrize("name", TF_CASES)
def test_golden(name):
    case = Case(name)
    assert_near(fused_model(case)(*case.inputs), case["output_exact"], MAX_ABS, REL_L2)


@pytest.mark.parametrize("attention", [None, "flash", "math"])
def test_velocity_of_a_batch_with_odd_counts(attention):
    model = fused_model(Case("tf_batch2"))
    model.set_attention(attention)
    latents, condition, text = random_inputs(model, batch=2, frames=3, height=6, width=10, tokens=7)
    prepared = model.prepare(text, condition, [0.9, 0.3, 0.0])
    found = [model.velocity(latents, k, prepared) for k in range(3)]
    model.set_fused_kernels(False)
    for k, velocity in enumerate(found):
        assert_near(velocity, model.velocity(latents, k, prepared), max_abs=1e-5, rel_l2=2e-6)


def test_bf16_is_as_good_as_the_plain_run():
    case = Case("tf_hd128")
    model = fused_model(case).cast(torch.bfloat16)
    output, truth = model(*case.inputs), case["output_exact"]
    assert output.dtype == torch.bfloat16
    error, plain = ((value.double() - truth).norm() / truth.norm() for value in (output, case["output_bf16_run"]))
    assert error <= 2 * plain
    assert_near(output, truth, **BF16)


def test_two_sizes_and_the_first_again_give_the_same_bytes():
    model = fused_model(Case("tf_base"))
    first, second = random_inputs(model), random_inputs(model, batch=2, frames=1, height=8, width=4, tokens=2)

    def run(latents, condition, text):
        return model.velocity(latents, 1, model.prepare(text, condition, [1.0, 0.5]))

    before = run(*first)
    run(*second)
    assert torch.equal(run(*first), before)


def test_the_step_cache_skips_the_same_steps():
    """It is asked with the video stream around the first block, as in the plain flow."""
    model = fused_model(Case("tf_deep"))
    latents, condition, text = random_inputs(model)
    sigmas = [1.0, 0.9, 0.8, 0.7, 0.6, 0.0]
    prepared, found = model.prepare(text, condition, sigmas), []
    for on in (True, False):
        model.set_fused_kernels(on)
        cache = StepCache(Policy(threshold=1e9, first=2, last=1), sigmas)
        found.append([model.velocity(latents, k, prepared, cache) for k in range(5)])
        assert cache.recalled == 2
    for fused_velocity, velocity in zip(*found, strict=True):
        assert_near(fused_velocity, velocity, max_abs=5e-5, rel_l2=1e-5)


def test_no_concatenation_and_no_more_products_than_needed(monkeypatch):
    """One product for the video's q, k, v and one for the text's; the last block's text gives keys and values only."""
    model = fused_model(Case("tf_base"))
    latents, condition, text = random_inputs(model)
    prepared = model.prepare(text, condition, [0.5])
    model.velocity(latents, 0, prepared)
    widths, products = [], torch.addmm

    def addmm(bias, x, weight, *, out=None):
        if out is not None:
            widths.append(weight.shape[1] // model.config.dim)
            return products(bias, x, weight, out=out)
        return products(bias, x, weight)

    monkeypatch.setattr(torch, "addmm", addmm)
    called = []
    for i, block in enumerate(model.transformer_blocks):
        for name in ("ff_context", "attn.to_add_out"):
            for module in block.get_submodule(name).modules():
                module.register_forward_hook(lambda *_, i=i: called.append(i))
    model.velocity(latents, 0, prepared)
    last = model.config.num_layers - 1
    assert widths == [3, 3] * last + [3, 2]
    assert called and last not in called


class Other(torch.nn.Linear):
    """A layer of another class, which shares no product."""


def test_layers_of_another_class_make_their_products_themselves():
    case = Case("tf_base")
    model = fused_model(case)
    for module in list(model.transformer_blocks.modules()):
        if type(module) is torch.nn.Linear:
            module.__class__ = Other
    assert_near(model(*case.inputs), case["output_exact"], MAX_ABS, REL_L2)


def test_blocks_that_stream_compute_the_same():
    """Weights that are on the device only while their block computes, in buffers that two blocks share."""
    case = Case("tf_deep")
    model = fused_model(case)
    BlockStream(model.transformer_blocks, torch.device("cpu"))
    for _ in range(2):
        assert_near(model(*case.inputs), case["output_exact"], MAX_ABS, REL_L2)


def test_gradients_are_refused_in_words():
    model = Case("tf_base").model()
    model.set_fused_kernels(True)
    with pytest.raises(RuntimeError, match="no gradients"):
        model(*Case("tf_base").inputs)
    with torch.no_grad():
        model(*Case("tf_base").inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_two_forms_of_gelu_are_told_apart(dtype):
    cpu = torch.device("cpu")
    assert fused.is_tanh_gelu(lambda x: F.gelu(x, approximate="tanh"), cpu, dtype)
    assert not fused.is_tanh_gelu(F.gelu, cpu, dtype)
    assert not fused.is_tanh_gelu(lambda x: x * float("nan"), cpu, dtype)
    assert not fused.gelu_in_product(cpu, dtype)


def test_gelu_inside_the_product_is_the_same_function(monkeypatch):
    """PyTorch's product on a CPU has the exact form, so only the way of the tensors is tested here."""
    case = Case("tf_base")
    model = fused_model(case)
    monkeypatch.setattr(fused, "gelu_in_product", lambda device, dtype: True)
    assert_near(model(*case.inputs), case["output_exact"], max_abs=5e-3, rel_l2=5e-4)


def test_kernels_are_on_where_they_can_run_and_else_it_is_said_why(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    choice = fused.choose_fused("auto", cpu)
    assert choice.path == "off" and "NVIDIA GPU" in choice.reason
    with pytest.raises(RequestError, match="NVIDIA GPU"):
        fused.choose_fused("on", cpu)
    monkeypatch.setattr(launch, "lack", lambda device: None)
    for wanted, path in (("auto", "on"), ("on", "on"), ("off", "off")):
        assert fused.choose_fused(wanted, cuda).path == path


def test_modulation_weights_pass_over_the_device_one_by_one(monkeypatch):
    """Here the float32 copies of bf16 layers stand for those on a device: none may outlive its product. At full size
    all of them are 16.5 GiB."""
    model = PAN2Transformer3DModel(**Case("tf_deep").config).to(torch.bfloat16)
    shape = model.transformer_blocks[0].norm1.linear.weight.shape
    copies, largest, product = [], [], F.linear

    def linear(x, weight, bias):
        if weight.shape == shape:
            copies.append(weakref.ref(weight))
            gc.collect()
            largest.append(sum(copy() is not None for copy in copies))
        return product(x, weight, bias)

    monkeypatch.setattr(layers.F, "linear", linear)
    model.modulations([1.0, 0.5])
    gc.collect()
    assert largest == [1] * model.config.num_layers
    assert not any(copy() is not None for copy in copies)


def test_the_loop_and_the_plain_call_agree_in_the_fused_flow_too():
    case = Case("tf_realchan")
    model, (hidden_states, timestep, text) = fused_model(case), case.inputs
    latents, condition = split(hidden_states, model.config.out_channels)
    prepared = model.prepare(text, condition, [timestep.item() / 1000])
    assert_near(model.velocity(latents, 0, prepared), case["output_exact"], max_abs=2e-5, rel_l2=4e-6)


def test_fp8_blocks_compute_the_same_in_both_flows():
    """Random weights: blocks one and two of four are fp8, and quantise what both flows hand them alike."""
    model = PAN2Transformer3DModel(**Case("tf_base").config | {"num_layers": 4}).requires_grad_(False)
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) / 20)
    convert(model)
    latents, condition, text = random_inputs(model, batch=2)
    prepared = model.prepare(text, condition, [0.7])
    plain = model.velocity(latents, 0, prepared)
    model.set_fused_kernels(True)
    assert_near(model.velocity(latents, 0, prepared), plain, max_abs=5e-2, rel_l2=1e-2)

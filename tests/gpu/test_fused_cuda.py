"""The fused flow on a real GPU: proofs that the interpreter can't give. tests/kernels runs on the GPU too."""

from pathlib import Path

import pytest
import torch

from engine import fused
from engine.attention import ABOUT, TRUE_TOKENS, Shape, attend, choose_attention, probe
from engine.fp8 import lack as fp8_lack
from engine.layers import TransformerBlock
from engine.mmdit import PAN2Transformer3DModel
from kernels import launch
from tests.engine.golden_case import BF16, Case, assert_near

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda:0")
TRUE = Shape(torch.bfloat16, 32, 128, TRUE_TOKENS)
TINY = Path(__file__).parents[2] / "presets/tiny/checkpoint"


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def test_triton_runs_here():
    assert launch.lack(CUDA) is None and not launch.interpreted()


def test_some_fused_attention_passed_its_trial_at_the_true_size():
    choice = choose_attention("auto", CUDA, TRUE)
    print(choice)
    assert choice.path in ("flash3", "cudnn", "flash")


def test_every_backend_that_passed_agrees_on_a_batch_with_fewer_queries():
    shape = Shape(torch.bfloat16, 4, 64, 500)
    qkv = torch.randn(2, 333, 3, 4, 64, device=CUDA, dtype=torch.bfloat16)
    q, k, v = qkv[:, :300, 0], qkv[:, :, 1], qkv[:, :, 2]
    truth = attend(q.double(), k.double(), v.double(), "math")
    for path in probe(CUDA, shape):
        if not path.lack:
            error = (attend(q, k, v, path.name).double() - truth).norm() / truth.norm()
            assert error < 1e-2, path.name
    assert {path.name for path in probe(CUDA, shape)} == set(ABOUT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gelu_in_the_product_is_the_tanh_form_at_the_released_width(dtype):
    assert fused.gelu_in_product(CUDA, dtype)
    layer = torch.nn.Linear(4096, 32768, device=CUDA, dtype=dtype)
    x = torch.randn(1, 257, 4096, device=CUDA, dtype=dtype) * 4
    exact = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
    exact = torch.nn.functional.gelu(exact, approximate="tanh")
    plain = torch.nn.functional.gelu(layer(x), approximate="tanh")
    ours, theirs = ((value.double() - exact).norm() / exact.norm() for value in (fused.gelu_linear(layer, x), plain))
    assert ours <= 2 * theirs


def full_block():
    torch.set_default_dtype(torch.bfloat16)
    try:
        with CUDA:
            block = TransformerBlock(4096, 32, 32768, 16384)
    finally:
        torch.set_default_dtype(torch.float32)
    for parameter in block.parameters():
        parameter.data.normal_(std=0.02)
    return block.requires_grad_(False)


@torch.no_grad()
def test_a_block_of_the_released_width_is_as_good_as_the_plain_one():
    """Against the same block in float32; 1,001 video and 77 text tokens, batch 2."""
    block = full_block()
    x, c = (torch.randn(2, n, 4096, device=CUDA, dtype=torch.bfloat16) for n in (1001, 77))
    modulation = torch.randn(2, 24576, device=CUDA) / 4
    out = torch.randn(2, 2, 4096, device=CUDA) / 4
    angles = 6 * torch.rand(1001, 64, device=CUDA)
    rope = angles.cos(), angles.sin()
    found = fused.run_blocks([block, block], x, c, [modulation, modulation], (out[0], out[1]), rope)

    def plain(x, c):
        x, c = block(x, c, modulation, rope)
        x, _ = block(x, c, modulation, rope, text_out=False)
        return torch.nn.functional.layer_norm(x.float(), (4096,), eps=1e-6) * (1 + out[1][:, None]) + out[0][:, None]

    simple = plain(x, c)
    block.float()
    truth = plain(x.float(), c.float()).double()
    ours, theirs = ((value.double() - truth).norm() / truth.norm() for value in (found, simple.bfloat16()))
    print(f"relative L2 fused {ours:.2e}, plain {theirs:.2e}")
    assert ours <= 2 * theirs


def test_golden_hd128_in_bf16_within_twice_the_released_error():
    case = Case("tf_hd128")
    model = case.model().requires_grad_(False).cast(torch.bfloat16).to(CUDA)
    model.set_fused_kernels(True)
    for path in probe(CUDA, Shape(torch.bfloat16, model.config.num_attention_heads, 128)):
        if path.lack:
            continue
        model.set_attention(path.name)
        output = model(*(value.to(CUDA) for value in case.inputs)).cpu()
        truth = case["output_exact"].double()
        error, plain = ((value.double() - truth).norm() for value in (output, case["output_bf16_run"]))
        assert error <= 2 * plain, path.name
        assert_near(output, case["output_exact"], **BF16)


def test_more_than_two_to_the_31_values():
    """A clip of the released width whose residual has more values than 32 bits count: its end is computed too."""
    from kernels.modulate.op import gated_modulate, modulate

    tokens = 2**31 // 4096 + 3
    x = torch.empty(1, tokens, 4096, device=CUDA, dtype=torch.bfloat16)
    for part in x[0].split(65536):
        part.normal_()
    y, (gate, shift, scale) = x.flip(1), torch.randn(3, 4096, device=CUDA)
    end = slice(tokens - 5, None)
    assert torch.equal(modulate(x, shift, scale)[:, end], modulate(x[:, end].clone(), shift, scale))
    residual, value = gated_modulate(x, y, gate, shift, scale)
    expected = gated_modulate(x[:, end].clone(), y[:, end].clone(), gate, shift, scale)
    assert torch.equal(residual[:, end], expected[0]) and torch.equal(value[:, end], expected[1])


def test_modulations_leave_no_weights_on_the_device():
    """Four released layers of norm1 on the host: two copies at most at a time, none afterwards."""
    config = {"num_attention_heads": 32, "attention_head_dim": 128, "mlp_ratio": 0.01, "context_mlp_ratio": 0.01}
    config |= {"num_layers": 4, "num_refiner_layers": 1, "refiner_mlp_ratio": 0.01, "text_embed_dim": 64}
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**config)
    model.to_empty(device="cpu").cast(torch.bfloat16)
    layers = [block.norm1 for block in model.transformer_blocks]
    model.to(CUDA)
    for layer in layers:
        layer.to("cpu")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, one = torch.cuda.memory_allocated(), layers[0].linear.weight.numel() * 4
    model.modulations([1.0, 0.5])
    kept = sum(2 * 6 * 4096 * 4 for _ in layers) + 2 * 2 * 4096 * 4
    assert torch.cuda.max_memory_allocated() - before < 2.2 * one
    assert torch.cuda.memory_allocated() - before < kept + 2**22


@pytest.mark.slow
def test_fused_and_plain_make_the_same_video_on_the_small_model():
    """Eight guided steps from the same noise: in bf16 the fused latents are at most twice as far from float32 as the
    plain ones."""
    pytest.importorskip("diffusers")
    from engine.checkpoint import load_scheduler, load_transformer
    from engine.denoise import denoise
    from engine.noise import draw_noise
    from engine.schedule import build_scheduler

    def latents(dtype, on, fp8=False):
        model = load_transformer(TINY, CUDA, dtype, fp8=fp8)
        model.set_fused_kernels(on)
        generator = torch.Generator().manual_seed(1)
        texts = [torch.randn(1, n, model.config.text_embed_dim, generator=generator) for n in (19, 5)]
        scheduler = build_scheduler(load_scheduler(TINY), 8, 20.0)
        *_, step = denoise(
            model, *texts, torch.zeros(1, 49, 5, 16, 28), draw_noise(3, (1, 48, 5, 16, 28)), scheduler, 2.5
        )
        return step.latents.double()

    truth, plain, ours = latents(torch.float32, False), latents(torch.bfloat16, False), latents(torch.bfloat16, True)
    far, cost = ((a - b).norm() / b.norm() for a, b in ((ours, truth), (plain, truth)))
    print(f"final latents against fp32: fused bf16 {far:.2e}, plain bf16 {cost:.2e}")
    assert far <= 2 * cost + 1e-3
    if not fp8_lack(CUDA):
        off = (latents(torch.bfloat16, True, fp8=True) - ours).square().mean().sqrt()
        psnr = float(20 * ((ours.max() - ours.min()) / off).log10())
        print(f"fp8 against bf16, final latents: {psnr:.1f} dB")
        assert psnr >= 35

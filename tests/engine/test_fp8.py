"""fp8 products: their arithmetic against float64, which layers go, and how far a model moves."""

import shutil

import pytest
import torch
from torch import nn

from engine import checkpoint, fp8, fused
from engine.checkpoint import load_transformer
from engine.errors import RequestError
from engine.fp8 import Fp8Linear, convert, lack, quantised, reference_product
from engine.layers import FeedForward
from engine.packed import joint
from kernels.quantise_rows.reference import quantise_rows
from tests import toy
from tests.engine.random_model import random_model


def products(rows=7, inputs=64, outputs=48, dtype=torch.float32):
    torch.manual_seed(0)
    layer = nn.Linear(inputs, outputs).to(dtype)
    layer.weight.data *= torch.logspace(-2, 2, outputs)[:, None]
    x = (torch.randn(rows, inputs) * torch.logspace(-2, 2, rows)[:, None]).to(dtype)
    return layer, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_is_the_product_of_what_was_quantised(dtype):
    layer, x = products(dtype=dtype)
    (values, scales), (weight, scale) = quantise_rows(x), quantise_rows(layer.weight)
    exact = (values.double() * scales) @ (weight.double() * scale).T + layer.bias.double()
    ours = Fp8Linear(layer)(x)
    assert ours.dtype == dtype
    size = (values.double().abs() * scales) @ (weight.double().abs() * scale).T
    assert ((ours.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-5 * size).all()


def test_each_row_and_each_output_keeps_its_own_accuracy():
    layer, x = products()
    error = (Fp8Linear(layer)(x) - layer(x)).abs()
    size = x.norm(dim=1, keepdim=True) * layer.weight.norm(dim=1)
    assert 1e-4 < (error / size).max() < 0.02


def test_any_shape_before_the_width_also_strided():
    layer, _ = products()
    fp8_layer, x = Fp8Linear(layer), torch.randn(2, 3, 128)[:, :, 32:96]
    together = fp8_layer(x)
    assert together.shape == (2, 3, 48)
    for b in range(2):
        torch.testing.assert_close(together[b], fp8_layer(x[b].contiguous()))


def test_three_layers_side_by_side_quantise_once_and_give_the_same():
    x = torch.randn(2, 5, 64)
    parts = [Fp8Linear(nn.Linear(64, 32)) for _ in range(3)]
    out = torch.full((2, 9, 96), torch.nan)
    fp8.project(parts, x, out[:, 2:7])
    assert torch.equal(out[:, 2:7], torch.cat([layer(x) for layer in parts], dim=-1))
    assert out[:, :2].isnan().all() and out[:, 7:].isnan().all()
    narrow = torch.zeros(2, 5, 100)
    fp8.project(parts, quantise_rows(x), narrow[:, :, 4:])
    assert torch.equal(narrow[:, :, 4:], out[:, 2:7]) and not narrow[:, :, :4].any()


def test_queries_keys_and_values_share_one_tensor():
    model, _ = random_model(layers=3)
    convert(model)
    for layers in model.transformer_blocks[1].attn.streams():
        for whole, leaf in zip(joint(layers), ("weight", "scale", "bias"), strict=True):
            assert whole.data_ptr() == getattr(layers[0], leaf).data_ptr(), leaf
            assert len(whole) == 3 * len(getattr(layers[0], leaf))


def test_gelu_goes_into_the_second_product_in_fp8():
    ff, x = FeedForward(64, 128), torch.randn(2, 5, 64)
    ff.net[0].proj, ff.net[2] = Fp8Linear(ff.net[0].proj), Fp8Linear(ff.net[2])
    torch.testing.assert_close(fused.feed_forward(ff, quantise_rows(x)), ff(x), rtol=1e-4, atol=2e-2)


def test_the_tensor_cores_get_aligned_tensors_and_enough_rows(monkeypatch):
    """Of three tokens a sample the second sample's scales begin at byte 12, of 67 at byte 268."""
    given = []

    def scaled_mm(values, weight, scale_a, scale_b, bias, out_dtype, use_fast_accum, out):
        given.append([tensor.data_ptr() % 16 for tensor in (values, scale_a)] + [len(values)])
        return reference_product(fp8.Quantised(values, scale_a), weight.t(), scale_b.t(), bias)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    layer = Fp8Linear(nn.Linear(32, 48))
    for tokens in (3, 67):
        second = fp8.Quantised(*(part[tokens:] for part in quantise_rows(torch.randn(2 * tokens, 32))))
        found = fp8.scaled_product(second, layer.weight, layer.scale, layer.bias)
        expected = reference_product(second, layer.weight, layer.scale, layer.bias)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert given == [[0, 0, 64], [0, 0, 67]]


def test_what_the_cpu_s_own_scaled_product_gives():
    layer, x = products(dtype=torch.bfloat16)
    weight, scale = quantise_rows(layer.weight)
    rows = quantise_rows(x)
    try:
        ours = fp8.scaled_product(rows, weight, scale, layer.bias)
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this PyTorch has none: {error}")
    expected = reference_product(rows, weight, scale, layer.bias.float())
    torch.testing.assert_close(ours.float(), expected, rtol=2**-7, atol=1e-3)


def test_the_first_and_last_block_and_all_that_is_small_stay():
    model, _ = random_model(layers=4)
    names = {name for name, _ in quantised(model)}
    matrices = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    inner = {f"attn.{name}" for name in matrices}
    inner |= {f"{ff}.net.{layer}" for ff in ("ff", "ff_context") for layer in ("0.proj", "2")}
    assert names == {f"transformer_blocks.{i}.{name}" for i in (1, 2) for name in inner}
    before = {name: parameter.dtype for name, parameter in model.named_parameters()}
    convert(model)
    changed = {name for name, parameter in model.named_parameters() if parameter.dtype != before[name]}
    assert changed == {f"{name}.weight" for name in names}
    assert set(model.state_dict()) == set(before), "the scales are no part of a checkpoint"


@pytest.mark.parametrize("batch", [1, 2])
def test_a_model_moves_a_little_and_not_nothing(batch):
    model, inputs = random_model(layers=4, batch=batch)
    full = model(*inputs)
    moved = convert(model)(*inputs) - full
    assert 1e-3 < moved.norm() / full.norm() < 0.1


def test_weights_that_come_later_give_the_same_as_weights_that_were_there():
    model, inputs = random_model(layers=3)
    with torch.device("meta"):
        later = convert(type(model)(**vars(model.config)))
    for name, value in model.named_parameters():
        path, _, leaf = name.rpartition(".")
        owner = later.get_submodule(path)
        if isinstance(owner, Fp8Linear) and leaf == "weight":
            owner.take(value)
        else:
            owner._parameters[leaf] = value
    assert torch.equal(later(*inputs), convert(model)(*inputs))


def test_sides_that_tensor_cores_do_not_take_are_refused():
    model, _ = random_model(layers=3, attention_head_dim=12, rope_axes_dim=[4, 4, 4])
    with pytest.raises(RequestError, match=r"sides of 16n; transformer_blocks.1.attn.to_q is 24 x 24. Choose bf16"):
        convert(model)


def test_a_device_without_fp8_is_said(monkeypatch):
    assert "need an NVIDIA GPU, and the device is cpu" in lack(torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    for capability, missing in (((8, 0), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert bool(lack(torch.device("cuda:0"))) == missing
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "compute capability 8.9" in lack(torch.device("cuda:0")) and "A100 has 8.0" in lack(torch.device("cuda:0"))


@pytest.fixture
def deeper(toy_checkpoint, tmp_path):
    """The toy checkpoint with a transformer of four layers, so that there are inner ones."""
    config, draw = toy.TRANSFORMER | {"num_layers": 4}, torch.Generator().manual_seed(0)
    folder = shutil.copytree(toy_checkpoint, tmp_path / "deeper")
    shutil.rmtree(folder / "transformer")
    shapes = toy.transformer_shapes(config)
    tensors = {name: toy.random_tensor(name, shape, draw).bfloat16() for name, shape in shapes.items()}
    toy.write_json(folder / "transformer" / "config.json", config)
    toy.write_shards(folder / "transformer", "diffusion_pytorch_model", tensors, shards=2)
    return folder


@pytest.mark.parametrize("stream", [False, True])
def test_weights_become_fp8_one_by_one_as_they_come_from_the_file(deeper, stream):
    cpu, inputs = torch.device("cpu"), random_model(layers=1)[1]
    expected = convert(load_transformer(deeper, cpu, torch.bfloat16))
    loaded = load_transformer(deeper, cpu, torch.bfloat16, fp8=True, stream=stream)
    kinds = [{p.dtype for p in block.ff.parameters()} for block in loaded.transformer_blocks]
    assert kinds == [{torch.bfloat16}, *[{torch.bfloat16, torch.float8_e4m3fn}] * 2, {torch.bfloat16}]
    assert torch.equal(loaded(*inputs), expected(*inputs))


def test_memory_is_asked_for_by_the_bytes_of_fp8(deeper, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoint, "require_memory", lambda what, needed, *_: asked.append(needed))
    for fp8_weights in (False, True):
        load_transformer(deeper, torch.device("cpu"), torch.bfloat16, fp8=fp8_weights)
    matrices = sum(layer.weight.numel() for _, layer in quantised(load_transformer(deeper, "cpu", torch.bfloat16)))
    assert asked[0] - asked[1] == matrices

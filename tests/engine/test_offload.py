"""Weights that visit: the same results as at home, one block's bytes at a time, nothing read that is not there."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from engine import fp8
from engine.mmdit import PAN2Transformer3DModel
from engine.offload import BlockStream, nbytes, streamed, visit
from tests.engine.random_model import random_model

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")


def golden():
    with safe_open(DATA / "tf_deep.safetensors", "pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        config = json.loads(file.metadata()["config"])
    model = PAN2Transformer3DModel(**config).eval().requires_grad_(False)
    model.load_state_dict({k.removeprefix("weights."): v for k, v in tensors.items() if k.startswith("weights.")})
    names = ("hidden_states", "timestep", "encoder_hidden_states")
    return model, [tensors[f"inputs.{name}"] for name in names]


def poison(stream):
    for slot in stream._slots:
        slot.fill_(0xFF)  # NaN in every floating-point type
    stream._held = [None] * len(stream._slots)


@pytest.mark.parametrize("blocks", [1, 2, 3, 4])
def test_streamed_blocks_compute_what_resident_ones_do(blocks):
    model, inputs = golden()
    assert len(model.transformer_blocks) >= blocks
    model.transformer_blocks = model.transformer_blocks[:blocks]
    expected = model(*inputs)
    stream = BlockStream(model.transformer_blocks, CPU)
    for _ in range(3):
        assert torch.equal(model(*inputs), expected)
    poison(stream)
    assert torch.equal(model(*inputs), expected)


def test_every_block_is_fetched_while_the_one_before_it_computes():
    model, inputs = golden()
    stream = BlockStream(model.transformer_blocks, CPU)
    order, fetch = [], stream._fetch

    def watched(i, unless=None):
        if stream._held[i % 2] != i and i % 2 != unless:
            order.append(i)
        fetch(i, unless)

    stream._fetch = watched
    model(*inputs)
    n = len(model.transformer_blocks)
    assert order == [*range(n)] + ([0] if n % 2 == 0 else [])


def test_a_pass_that_ends_after_its_first_block_leaves_the_next_one_whole():
    model, inputs = golden()
    expected = model(*inputs)
    BlockStream(model.transformer_blocks, CPU)
    blocks = model.blocks
    model.blocks = lambda x, c, m, rope, enough: x if blocks(x, c, m, rope, lambda *_: True) is None else None
    model(*inputs)
    model.blocks = blocks
    assert torch.equal(model(*inputs), expected)


def test_the_device_holds_two_blocks_and_the_host_the_rest():
    model, _ = golden()
    sizes = [nbytes(streamed(block)) for block in model.transformer_blocks]
    weights = sum(tensor.nbytes for _, tensor in streamed(model.transformer_blocks[0]))
    assert weights <= sizes[0] < 1.05 * weights + 256 * len(streamed(model.transformer_blocks[0]))
    stream = BlockStream(model.transformer_blocks, CPU)
    assert [len(slot) for slot in stream._slots] == [max(sizes)] * 2
    assert [len(home) for home in stream._home] == sizes
    block = model.transformer_blocks[0]
    assert not any(name.startswith(("norm1", "scale_shift")) for name, _ in streamed(block))


def test_weights_that_share_a_product_lie_side_by_side():
    model, _ = golden()
    attn = model.transformer_blocks[1].attn
    BlockStream(model.transformer_blocks, CPU)
    for layers in ((attn.to_q, attn.to_k, attn.to_v), (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)):
        a, b, c = (layer.weight for layer in layers)
        assert b.data_ptr() - a.data_ptr() == a.nbytes == c.data_ptr() - b.data_ptr()


def test_fp8_blocks_stream_too():
    model, inputs = random_model(layers=4)
    fp8.convert(model)
    expected = model(*inputs)
    BlockStream(model.transformer_blocks, CPU)
    assert torch.equal(model(*inputs), expected)


def test_a_visitor_is_elsewhere_inside_and_at_home_afterwards_also_after_an_error():
    model, x = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval(), torch.randn(2, 3)
    home, expected = {tensor.data_ptr() for tensor in model.state_dict().values()}, model(x)
    with pytest.raises(RuntimeError, match="inside"), visit(model, CPU):
        assert not home & {tensor.data_ptr() for tensor in model.state_dict().values()}
        assert torch.equal(model(x), expected)
        raise RuntimeError("inside")
    assert {tensor.data_ptr() for tensor in model.state_dict().values()} == home
    assert torch.equal(model(x), expected)

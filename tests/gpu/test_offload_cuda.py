"""Blocks that stream from page-locked memory: the same bits as resident ones, with the copies beside the work."""

import pytest
import torch

from engine import fp8
from engine.offload import BlockStream, streamed
from engine.rehearsal import SMALL, random_transformer

CUDA = torch.device("cuda:0")
pytestmark = pytest.mark.gpu


def inputs(config, frames=2):
    draw = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.empty(1, config.in_channels, frames, 16, 16, device=CUDA).normal_(generator=draw)
    text = torch.empty(1, 9, config.text_embed_dim, device=CUDA).normal_(generator=draw)
    return hidden, torch.tensor([500.0], device=CUDA), text


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("fused", [False, True])
def test_streamed_blocks_give_the_same_bits_again_and_again(precision, fused):
    if precision == "fp8" and (lack := fp8.lack(CUDA)):
        pytest.skip(lack)
    model = random_transformer(SMALL.config, CUDA, torch.bfloat16)
    if precision == "fp8":
        fp8.convert(model)
    model.set_fused_kernels(fused)
    given = inputs(SMALL.config)
    expected = model(*given)
    stream = BlockStream(model.transformer_blocks, CUDA)
    assert all(home.is_pinned() for home in stream._home)
    for _ in range(20):
        assert torch.equal(model(*given), expected)


def test_a_copy_never_overtakes_the_work_that_reads_its_slot():
    """Long work in every block, so that copies, which are short here, would come too early if nothing held them."""
    model = random_transformer(SMALL.config, CUDA, torch.bfloat16)
    given = inputs(SMALL.config)
    expected = model(*given)
    BlockStream(model.transformer_blocks, CUDA)
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: torch.cuda._sleep(2_000_000))
    for _ in range(3):
        assert torch.equal(model(*given), expected)


def test_the_device_gives_the_weights_back():
    model = random_transformer(SMALL.config, CUDA, torch.bfloat16)
    weights = sum(tensor.nbytes for block in model.transformer_blocks for _, tensor in streamed(block))
    before = torch.cuda.memory_allocated()
    stream = BlockStream(model.transformer_blocks, CUDA)
    left = before - torch.cuda.memory_allocated()
    assert left > weights - sum(len(slot) for slot in stream._slots) - 2**20

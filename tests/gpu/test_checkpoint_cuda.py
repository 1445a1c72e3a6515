"""Loading onto a CUDA device: where each tensor ends up, and the words for too little memory."""

import pytest
import torch

from engine import checkpoint
from engine.errors import ResourceError

pytestmark = pytest.mark.gpu
CUDA, CPU, BF16 = torch.device("cuda:0"), torch.device("cpu"), torch.bfloat16


def test_the_transformer_is_on_the_device_but_for_its_modulations(toy_checkpoint):
    ours = checkpoint.load_transformer(toy_checkpoint, CUDA, BF16).state_dict()
    there = checkpoint.load_transformer(toy_checkpoint, CPU, BF16).state_dict()
    for name, tensor in ours.items():
        island = ".norm1.linear." in name
        assert tensor.device == (CPU if island else CUDA), name
        assert tensor.dtype == (torch.float32 if island else BF16), name
        assert torch.equal(tensor.cpu(), there[name]), name


def test_vae_and_text_encoder_are_on_the_device_with_their_buffers(toy_checkpoint):
    vae = checkpoint.load_vae(toy_checkpoint, CUDA, torch.float32)
    text = checkpoint.load_text_encoder(toy_checkpoint, CUDA, BF16)
    tensors = [*vae.state_dict().values(), *text.model.parameters(), *text.model.buffers()]
    assert {tensor.device for tensor in tensors} == {CUDA}
    there = checkpoint.load_text_encoder(toy_checkpoint, CPU, BF16).encode("a red circle").embedding
    here = text.encode("a red circle").embedding.cpu()
    assert torch.linalg.norm(here.float() - there.float()) < 0.02 * torch.linalg.norm(there.float())


def test_a_full_device_is_said_with_numbers(toy_checkpoint):
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1e-6, CUDA)
    try:
        with pytest.raises(ResourceError, match=r"The vae .* does not fit on cuda:0: it needs 3.0 MiB and .* are free"):
            checkpoint.load_vae(toy_checkpoint, CUDA, torch.float32)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, CUDA)
    assert checkpoint.load_vae(toy_checkpoint, CUDA, torch.float32).device == CUDA

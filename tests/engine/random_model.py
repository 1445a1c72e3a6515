"""A small transformer whose every weight is random, so that every part of it shows; widths as fp8 needs them."""

import torch

from engine.mmdit import PAN2Transformer3DModel

CONFIG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_refiner_layers": 1,
    "mlp_ratio": 2.0,
    "context_mlp_ratio": 2.0,
    "refiner_mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "rope_axes_dim": [4, 6, 6],
}


def random_model(layers=4, seed=0, batch=1, **changed):
    """The model in fp32, and inputs for it: [B, 97, 2, 4, 6], [B], [B, 5, 24]."""
    generator = torch.Generator().manual_seed(seed)
    model = PAN2Transformer3DModel(**CONFIG | {"num_layers": layers} | changed).eval().requires_grad_(False)
    for parameter in model.parameters():
        fan_in = parameter[0].numel() if parameter.dim() > 1 else 100
        values = torch.randn(parameter.shape, generator=generator) / fan_in**0.5
        parameter.copy_(values if parameter.dim() > 1 else 1 + values if parameter.eq(1).all() else values)
    hidden = torch.randn(batch, 97, 2, 4, 6, generator=generator)
    timestep = torch.linspace(300, 900, batch)
    return model, [hidden, timestep, torch.randn(batch, 5, 24, generator=generator)]

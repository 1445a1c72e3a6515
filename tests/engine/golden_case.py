"""Golden files for the tests of the transformer: what they hold and how near is near enough."""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from engine.mmdit import PAN2Transformer3DModel

DATA = Path(__file__).parents[1] / "data"
BF16 = {"max_abs": 0.1, "rel_l2": 1.5e-2}
INPUTS = ("hidden_states", "timestep", "encoder_hidden_states")
TF_CASES = sorted(path.stem for path in DATA.glob("tf_*.safetensors"))


class Case:
    """One file: its tensors by name, its metadata, and for `tf_*` the model that it describes."""

    def __init__(self, name: str):
        with safe_open(DATA / f"{name}.safetensors", "pt") as file:
            self.meta = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118

    def __getitem__(self, key: str) -> Tensor:
        return self.tensors[key]

    def input(self, key: str) -> Tensor:
        return self.tensors[f"inputs.{key}"]

    @property
    def inputs(self) -> list[Tensor]:
        return [self.input(key) for key in INPUTS]

    @property
    def config(self) -> dict:
        return json.loads(self.meta["config"])

    def model(self, **changes) -> PAN2Transformer3DModel:
        model = PAN2Transformer3DModel(**self.config | changes)
        weights = {k.removeprefix("weights."): v for k, v in self.tensors.items() if k.startswith("weights.")}
        model.load_state_dict(weights, strict=True)
        return model.eval()


def errors(value: Tensor, expected: Tensor) -> tuple[float, float]:
    """Largest absolute difference and relative L2."""
    assert value.shape == expected.shape
    difference = value.double() - expected.double()
    return difference.abs().max().item(), (difference.norm() / expected.double().norm()).item()


def assert_near(value: Tensor, expected: Tensor, max_abs: float, rel_l2: float, what: str = "output") -> None:
    largest, relative = errors(value, expected)
    # Written so that NaN fails.
    assert largest <= max_abs and relative <= rel_l2, (
        f"{what}: max abs {largest:.2e} (limit {max_abs:.1e}), relative L2 {relative:.2e} (limit {rel_l2:.1e}), "
        f"worst at {torch.unravel_index((value.double() - expected).abs().argmax(), expected.shape)}"
    )


def split(hidden_states: Tensor, channels: int = 4) -> tuple[Tensor, Tensor]:
    """Noisy latents, and the condition with its mask."""
    return hidden_states[:, :channels], hidden_states[:, channels:]


def random_inputs(model, batch=1, frames=3, height=4, width=6, tokens=5) -> tuple[Tensor, Tensor, Tensor]:
    """Latents, condition and text that fit the model."""
    c = model.config
    latents = torch.randn(batch, c.out_channels, frames, height, width)
    condition = torch.randn(batch, c.out_channels + 1, frames, height, width)
    return latents, condition, torch.randn(batch, tokens, c.text_embed_dim)

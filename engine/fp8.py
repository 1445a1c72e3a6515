"""Products in fp8: e4m3 weights with a scale for every output row, activations quantised token by token, sums in
float32 or what the tensor cores make of it.

Every matrix of every block but the first and the last goes, those of the text too: the small model's final latents then
stay at 55 dB, with the first and last block at 50 (engine/benchmarks.md). Embedders, refiner, modulations and the
output keep the dtype of the release.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.errors import RequestError
from engine.layers import JointAttention
from engine.packed import Layers, joint
from kernels.quantise_rows.op import quantise_rows
from kernels.quantise_rows.reference import E4M3, Quantised, dequantise

CAPABILITY = (8, 9)
MULTIPLE = 16  # of both sides of a matrix; what the tensor cores take
LEAST_ROWS = 64  # cuBLASLt 13.0 has no product of 5 rows with 32768 inputs on an H200; short texts have few rows


class Fp8Linear(nn.Module):
    """A linear layer whose weight [out, in] is e4m3 with float32 scales [out, 1]; the bias keeps its dtype.

    through: a device that quantises weights which live on another, None: where they are.
    """

    joined = {"weight": E4M3, "scale": torch.float32, "bias": None}  # noqa: RUF012  (see `engine.packed`)

    def __init__(self, layer: nn.Linear, through: torch.device | None = None) -> None:
        super().__init__()
        self.through = through
        self.in_features, self.out_features = layer.in_features, layer.out_features
        empty = torch.empty_like(layer.weight, dtype=E4M3)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", torch.empty(len(empty), 1, device=empty.device), persistent=False)
        if not layer.weight.is_meta:
            self.take(layer.weight)

    def take(self, weight: Tensor) -> None:
        """Quantise a weight of the release and keep it, on the device where it is, or in the memory that is there."""
        values, scale = quantise_rows(weight.detach().to(self.through or weight.device))
        if self.weight.is_meta:
            self.scale = scale.to(weight.device)
            self.weight = nn.Parameter(values.to(weight.device), requires_grad=False)
        else:
            self.scale.copy_(scale)
            self.weight.data.copy_(values)

    def forward(self, x: Tensor | Quantised) -> Tensor:
        """x [..., in], quantised here if it is not yet, to [..., out] in the dtype of the bias."""
        out = self.bias.new_empty(*x.shape[:-1], self.out_features)
        multiply(as_rows(x), self.weight, self.scale, self.bias, out.flatten(0, -2))
        return out


def as_rows(x: Tensor | Quantised) -> Quantised:
    """[..., in] as rows in fp8."""
    return x.flatten() if isinstance(x, Quantised) else quantise_rows(x.flatten(0, -2))


def project(layers: Layers, x: Tensor | Quantised, out: Tensor) -> None:
    """All `Fp8Linear` layers of x [B, S, in] side by side into `out` [B, S, outputs of all]: quantised once, one
    product for each sample."""
    rows, (weight, scale, bias) = as_rows(x), joint(layers)
    for values, scales, part in zip(*(t.chunk(len(out)) for t in rows), out, strict=True):
        multiply(Quantised(values, scales), weight, scale, bias, part)


def multiply(x: Quantised, weight: Tensor, scale: Tensor, bias: Tensor, out: Tensor) -> None:
    """x [rows, in] times an e4m3 weight [out, in] with scales [out, 1], plus bias, into `out` [rows, out]."""
    if x.values.is_cuda and out.is_contiguous():
        scaled_product(x, weight, scale, bias, out)
    else:
        product = scaled_product if x.values.is_cuda else reference_product
        out.copy_(product(x, weight, scale, bias))


def scaled_product(x: Quantised, weight: Tensor, scale: Tensor, bias: Tensor, out: Tensor | None = None) -> Tensor:
    """On the tensor cores; in the bias's dtype, which is bf16."""
    if (lacking := LEAST_ROWS - len(x.values)) > 0:
        values = F.pad(x.values.view(torch.uint8), (0, 0, 0, lacking)).view(E4M3)
        product = scaled_product(Quantised(values, F.pad(x.scales, (0, 0, 0, lacking))), weight, scale, bias)[:-lacking]
        return product if out is None else out.copy_(product)
    return torch._scaled_mm(
        x.values,
        weight.t(),
        scale_a=_aligned(x.scales),
        scale_b=scale.t(),
        bias=bias,
        out_dtype=bias.dtype,
        use_fast_accum=True,
        out=out,
    )


def _aligned(scales: Tensor) -> Tensor:
    """cuBLASLt refuses scales that begin in the middle of 16 bytes, as those of a second sample may."""
    return scales if scales.data_ptr() % 16 == 0 else scales.clone()


def reference_product(x: Quantised, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """The same with sums in float32 and one rounding to the bias's dtype: the truth of tests, and what a CPU runs."""
    return F.linear(dequantise(*x), dequantise(weight, scale), bias.float()).to(bias.dtype)


def quantised(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers of a `PAN2Transformer3DModel` that fp8 takes, by name."""
    last = len(model.transformer_blocks) - 1
    for i, block in enumerate(model.transformer_blocks):
        if 0 < i < last:
            for name, layer in block.named_modules():
                if isinstance(layer, nn.Linear) and not name.startswith("norm1"):
                    yield f"transformer_blocks.{i}.{name}", layer


def convert(model: nn.Module, through: torch.device | None = None) -> nn.Module:
    """Put fp8 layers in place of those that `quantised` names; works on meta, before weights are loaded. Returns it.

    Raises RequestError for matrices whose sides are no multiples of 16.
    """
    for name, layer in list(quantised(model)):
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            sides = f"{layer.out_features} x {layer.in_features}"
            raise RequestError(f"precision = 'fp8' needs matrices with sides of 16n; {name} is {sides}. Choose bf16.")
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, Fp8Linear(layer, through))
    for module in model.modules():
        if isinstance(module, JointAttention):
            module.pack()
    return model


def lack(device: torch.device) -> str | None:
    """Why fp8 products can't run on a device; None where they can."""
    if device.type != "cuda":
        return f"fp8 products need an NVIDIA GPU, and the device is {device}"
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        name, has = torch.cuda.get_device_name(device), "{}.{}".format(*capability)
        return f"fp8 products need compute capability 8.9 (Ada, Hopper, Blackwell or newer), and {name} has {has}"
    return None

"""How near a kernel must be: its error against exact arithmetic is at most twice that of plain PyTorch operations in
the same dtype, plus a floor, because plain operations are sometimes exact by luck."""

import torch
from torch import Tensor

FLOORS = {torch.float32: 1e-7, torch.bfloat16: 4e-4, torch.float16: 5e-5}  # a quarter of a last place, or a little more
DTYPES = tuple(FLOORS)


def one_rounding(device: torch.device, path: str) -> float:
    """Largest relative error of one rounding to bf16. Triton's interpreter cuts off where a GPU rounds."""
    return 7.85e-3 if path == "kernel" and device.type == "cpu" else 3.92e-3


def assert_as_good_as_plain(ours: Tensor, plain: Tensor, exact: Tensor, what: str = "output") -> None:
    """In relative L2 over all values, and by the largest error relative to the largest value of its row."""
    assert ours.dtype == plain.dtype and ours.shape == exact.shape, what
    floor, exact = FLOORS[ours.dtype], exact.double().cpu()
    rows = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    ours, plain = (value.double().cpu() - exact for value in (ours, plain))
    for name, measure in (
        ("relative L2", lambda error: error.norm() / exact.norm()),
        ("largest error of a row", lambda error: (error.abs() / rows).max()),
    ):
        limit = 2 * measure(plain) + floor
        worst = torch.unravel_index((ours.abs() / rows).argmax(), ours.shape)
        # Written so that NaN fails.
        assert measure(ours) <= limit, f"{what}: {name} {measure(ours):.2e}, limit {limit:.2e}, worst at {worst}"

"""The compiled convolutions on a GPU, each tile, against fp32. The first run compiles for minutes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine.condition import denormalise
from engine.decode import decode, float_frames
from engine.decode_paths import explain, fast_decoder
from engine.settings import DecodeSettings
from kernels.vae_decode import built, reference
from kernels.vae_decode.built import Built, Convolution, KernelError, Stencil
from kernels.vae_decode.plan import PLANS
from kernels.vae_decode.recipe import TILES
from kernels.vae_decode.tiles import Row
from tests.engine.wan_vae import normal_latents, small_vae, theirs

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
# Relative rms of one rounding to the type is 1.7e-3 and 2.1e-4; sums in fp32 add far less than half of it.
LIMITS = {torch.bfloat16: 2.6e-3, torch.float16: 3.2e-4}
DTYPES = tuple(LIMITS)


@pytest.fixture(scope="module")
def kernels():
    device = torch.device("cuda", torch.cuda.current_device())
    lack = built.lack(device)
    if lack:
        pytest.skip(lack)
    return Built.on(device, say=print)


@pytest.fixture(autouse=True)
def true_fp32():
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(params=[(tile, first) for tile in (*TILES["hopper"], *TILES["blackwell"]) for first in (0, 1)], ids=str)
def tile(request, kernels, monkeypatch):
    """Every layer takes this tile and order of taps, whatever the table says."""
    name, taps_first = request.param
    if name not in TILES[kernels.target.family]:
        pytest.skip(f"{name} is a tile of another architecture")
    monkeypatch.setattr(kernels, "row", lambda *layer: Row(0, 0, name, bool(taps_first)))
    return name


def numbers(*shape, dtype, scale=1.0):
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def truth(buffer, weight, bias, residual, pad_rows=(1, 1), pad_columns=None):
    columns = (weight.shape[3] // 2,) * 2 if pad_columns is None else pad_columns
    x = F.pad(buffer.float().permute(3, 0, 1, 2), (*columns, *pad_rows))
    y = F.conv3d(x[None], weight.float().permute(0, 4, 1, 2, 3))[0].permute(1, 2, 3, 0)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual.float()


def weights_for(o, *kernel, dtype):
    return numbers(o, *kernel, dtype=dtype, scale=1 / torch.Size(kernel).numel() ** 0.5)


class Poisoned:
    """Memory full of NaN with `inside` somewhere in it: all of that, and nothing else, is to be written."""

    def __init__(self, *shape, dtype, rows=None):
        whole = (shape[0], shape[1] + 8, *shape[2:]) if rows == "apart" else shape
        size = torch.Size(whole).numel()
        self.memory = torch.full((size + 2048,), float("nan"), dtype=dtype, device="cuda")
        self.inside = self.memory[1024:-1024].view(whole)
        if rows == "apart":
            self.inside = self.inside[:, 3 : 3 + shape[1]]

    def check(self, wanted):
        y = self.inside.clone()
        assert not y.isnan().any(), "positions that nobody wrote"
        self.inside.fill_(float("nan"))
        assert self.memory.isnan().all(), "written outside of the output"
        error = (y.float() - wanted).norm() / wanted.norm()
        assert error < LIMITS[y.dtype], f"relative rms {error:.1e}"


SMALL = [
    # depth, height, width, channels, filters: partial tiles in every direction, 48 channels, many tiles for each block
    (3, 5, 7, 8, 8),
    (5, 9, 13, 48, 1024),
    (6, 11, 30, 64, 264),
    (4, 44, 78, 128, 512),
    (8, 80, 100, 72, 256),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_direct(kernels, tile, dtype, shape):
    d, h, w, c, o = shape
    buffer, bias = numbers(d, h, w, c, dtype=dtype), torch.randn(o, device="cuda")
    for kernel, pads in (((3, 3, 3), (1, 1)), ((3, 3, 3), (1, 0)), ((3, 3, 3), (0, 0)), ((3, 1, 1), (0, 0))):
        weight = weights_for(o, *kernel, c, dtype=dtype)
        shape = (d - 2, h + sum(pads) - kernel[1] + 1, w, o)
        residual = numbers(*shape, dtype=dtype)
        for b, r in ((bias, residual), (bias, None), (None, residual), (None, None)):
            for rows in (None, "apart"):
                out = Poisoned(*shape, dtype=dtype, rows=rows)
                kernels.direct(buffer, weight, b, r, out.inside, pads)
                out.check(truth(buffer, weight, b, r, pads))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bands_of_larger_frames_have_the_bytes_of_the_whole(kernels, tile, dtype):
    d, h, w, c, o = 6, 23, 37, 64, 264
    buffer, weight, bias = numbers(d, h + 2, w, c, dtype=dtype), weights_for(o, 3, 3, 3, c, dtype=dtype), None
    residual = numbers(d - 2, h, w, o, dtype=dtype)
    whole = torch.empty_like(residual)
    kernels.direct(buffer, weight, bias, residual, whole, (0, 0))
    for height in (1, 4, 22):
        pieces = Poisoned(d - 2, h, w, o, dtype=dtype).inside
        for a in range(0, h, height):
            rows = slice(a, min(a + height, h))
            kernels.direct(buffer[:, a : rows.stop + 2], weight, bias, residual[:, rows], pieces[:, rows], (0, 0))
        assert torch.equal(pieces, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_residual_may_be_the_output(kernels, tile, dtype):
    buffer, weight = numbers(6, 30, 41, 64, dtype=dtype), weights_for(264, 3, 3, 3, 64, dtype=dtype)
    out = numbers(4, 30, 41, 264, dtype=dtype)
    apart = torch.empty_like(out)
    kernels.direct(buffer, weight, None, out.clone(), apart)
    kernels.direct(buffer, weight, None, out, out)
    assert torch.equal(out, apart)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kernel", [(3, 3), (3, 1), (1, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("shape", [(6, 2, 11, 30, 64, 264), (24, 1, 6, 9, 72, 512), (1, 3, 12, 17, 40, 1024)], ids=str)
def test_phases(kernels, tile, dtype, kernel, shape):
    p, n, h, w, c, o = shape
    inputs, weights = numbers(p, n, h, w, c, dtype=dtype), weights_for(p * o, *kernel, c, dtype=dtype)
    weights = weights.view(p, o, *kernel, c)
    for rows, columns in (((1, 1), (1, 1)), ((0, 1), (1, 0)), ((0, 0), (0, 0))):
        out = Poisoned(p, n, h + sum(rows) - kernel[0] + 1, w + sum(columns) - kernel[1] + 1, o, dtype=dtype)
        kernels.phases(inputs, weights, out.inside, rows, columns)
        wanted = [truth(x, k[:, None], None, None, rows, columns) for x, k in zip(inputs, weights, strict=True)]
        out.check(torch.stack(wanted))


LAYERS = [
    (1024, 1024, 8, 88, 156), (1024, 1024, 4, 44, 78), (512, 512, 16, 176, 312),
    (256, 256, 16, 352, 624), (1024, 512, 16, 176, 312), (512, 256, 16, 352, 624),
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_the_decoders_layers_at_their_true_size(kernels, dtype, layer):
    c, o, t, h, w = layer
    buffer, weight = numbers(t + 2, h, w, c, dtype=dtype), weights_for(o, 3, 3, 3, c, dtype=dtype)
    bias, residual = torch.randn(o, device="cuda"), numbers(t, h, w, o, dtype=dtype)
    out = torch.full((t, h, w, o), float("nan"), dtype=dtype, device="cuda")
    kernels.direct(buffer, weight, bias, residual, out)
    assert not out.isnan().any()
    for frame in (0, t // 2, t - 1):
        wanted = truth(buffer[frame : frame + 3], weight, bias, residual[frame : frame + 1])
        error = (out[frame : frame + 1].float() - wanted).norm() / wanted.norm()
        assert error < LIMITS[dtype], f"frame {frame}: relative rms {error:.1e}"
    again = torch.empty_like(out)
    kernels.direct(buffer, weight, bias, residual, again)
    assert torch.equal(again, out), "two runs differ: a race"


def test_tensors_of_more_than_two_to_the_31_elements(kernels):
    if torch.cuda.mem_get_info()[0] < 24 * 2**30:
        pytest.skip("needs 24 GiB of free GPU memory")
    buffer, weight = (
        numbers(22, 352, 624, 512, dtype=torch.float16),
        weights_for(256, 3, 3, 3, 512, dtype=torch.float16),
    )
    assert buffer.numel() > 2**31
    out = torch.full((20, 352, 624, 256), float("nan"), dtype=torch.float16, device="cuda")
    kernels.direct(buffer, weight, None, None, out)
    assert not out.isnan().any()
    wanted = truth(buffer[-3:], weight, None, None)
    assert (out[-1:].float() - wanted).norm() / wanted.norm() < LIMITS[torch.float16]


def test_work_is_queued_on_the_current_stream(kernels):
    buffer, weight = torch.zeros(4, 40, 50, 64, dtype=torch.float16, device="cuda"), None
    weight = weights_for(64, 3, 3, 3, 64, dtype=torch.float16)
    fresh, out = (
        numbers(4, 40, 50, 64, dtype=torch.float16),
        torch.empty(2, 40, 50, 64, dtype=torch.float16, device="cuda"),
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        buffer.copy_(fresh)
        kernels.direct(buffer, weight, None, None, out)
    torch.cuda.synchronize()
    wanted = truth(fresh, weight, None, None)
    assert (out.float() - wanted).norm() / wanted.norm() < LIMITS[torch.float16]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device_does_its_own_work():
    device = torch.device("cuda", 1)
    x = torch.randn(4, 20, 30, 64, device=device).half()
    weight, out = (
        torch.randn(64, 3, 3, 3, 64, device=device).half() / 42,
        torch.empty(2, 20, 30, 64, device=device).half(),
    )
    Built.on(device, say=print).direct(x, weight, None, None, out)
    wanted = truth(x, weight, None, None)
    assert (out.float() - wanted).norm() / wanted.norm() < LIMITS[torch.float16]


def test_wrong_calls_are_answered_with_words_and_the_next_one_works(kernels):
    for tile, words in ((-1, "no such tile"), (0, "sizes, pads or addresses")):
        with pytest.raises(KernelError, match=words):
            kernels.library.convolve(tile, Convolution())
    with pytest.raises(KernelError, match="sizes, pads or addresses"):
        kernels.library.stencil(Stencil())
    out = Poisoned(2, 9, 13, 264, dtype=torch.float16)
    buffer, weight = numbers(4, 9, 13, 64, dtype=torch.float16), weights_for(264, 3, 3, 3, 64, dtype=torch.float16)
    kernels.direct(buffer, weight, None, None, out.inside)
    out.check(truth(buffer, weight, None, None))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 3, 1), (3, 9, 130), (16, 354, 624)], ids=str)
def test_the_stencil_has_the_bytes_of_its_reference(kernels, dtype, shape):
    t, rows, w = shape
    values, bias = numbers(t, rows, w, 112, dtype=dtype, scale=0.3), torch.randn(12, device="cuda") * 0.1
    for out_dtype, size in ((torch.float32, (t, rows + 1, w, 12)), (torch.uint8, (t, 2 * rows, 2 * w, 3))):
        # A band of larger frames.
        band = slice(0, rows - 2) if out_dtype == torch.float32 else slice(2, 2 * rows - 2)
        out, wanted = (torch.full(size, 77, dtype=out_dtype, device="cuda") for _ in range(2))
        finite, flag = torch.ones(1, dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.int32, device="cuda")
        kernels.stencil(out[:, band], values, bias, finite)
        reference.stencil(wanted[:, band], values, bias, flag)
        assert torch.equal(out, wanted) and finite.item() == flag.item() == 1


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_the_stencil_reports_one_value_that_is_not_finite(kernels, wrong):
    values, bias = numbers(3, 9, 130, 112, dtype=torch.float16), torch.zeros(12, device="cuda")
    values[2, 4, 77, 30] = wrong
    out, finite = (
        torch.empty(3, 14, 260, 3, dtype=torch.uint8, device="cuda"),
        torch.ones(1, dtype=torch.int32, device="cuda"),
    )
    kernels.stencil(out, values, bias, finite)
    assert finite.item() == 0


@pytest.mark.parametrize("precision, decibels", [("fp16", 60), ("bf16", 45)])
def test_decode_path_built_gives_the_same_bytes_however_the_work_is_cut(kernels, precision, decibels):
    vae, latents, settings = small_vae(64), normal_latents(9), DecodeSettings("built", precision)
    wanted = theirs(vae, latents)
    vae = vae.cuda()
    got = torch.cat(list(float_frames(vae, latents, settings))).cpu()
    assert 10 * torch.log10(4 / (got.double() - wanted.double()).square().mean()) > decibels
    whole = np.concatenate([chunk.frames.copy() for chunk in decode(vae, latents, settings)])
    for passes in ((9,), (2, 3, 4), (1,)):
        frames = [chunk.frames.copy() for chunk in decode(vae, latents, settings, passes=passes)]
        assert np.array_equal(np.concatenate(frames), whole)
    for plan in PLANS:
        state = fast_decoder(vae, explain(settings, kernels.device)).start(plan)
        pieces = fast_decoder(vae, explain(settings, kernels.device)).frames(prepared(vae, latents, precision), state)
        frames = torch.cat([piece for piece, finite in pieces if finite.item()])
        assert np.array_equal(frames.cpu().numpy(), whole)


def prepared(vae, latents, precision):
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    return denormalise(latents.cuda(), vae.config)[0].to(dtype)

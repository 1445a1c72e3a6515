"""The portable decoder against diffusers' own and against itself, in every way of cutting the work."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from diffusers import AutoencoderKLWan

from kernels.vae_decode import reference
from kernels.vae_decode.convolve import Cudnn
from kernels.vae_decode.plan import GIB, PLANS, Plan
from kernels.vae_decode.portable import PortableDecoder
from kernels.vae_decode.reference import Reference
from kernels.vae_decode.table import is_measured, rule, ways
from tests.engine.test_bands import on_bands
from tests.engine.test_vae_stream import Live
from tests.engine.wan_vae import denormalised, normal_latents, small_vae, theirs

TOLERANCE = 1e-5  # fp32 against fp32, values in [-1, 1]
WHOLE, CUT = Plan((4, 8, 16, 16), GIB), Plan((4, 4, 4, 4), 1)
WAYS = pytest.mark.parametrize("way", ["direct", "time", "time_width"])


def always(way):
    return lambda inputs, outputs, level: way


@pytest.fixture(scope="module")
def vae():
    return small_vae()


def pieces(decoder, vae, latents, cuts, plan=WHOLE, rows=None, kind="run"):
    """What a decoder yields for normalised latents in passes of the given lengths."""
    state = decoder.start(plan, rows)
    parts = denormalised(vae, latents)[0].to(decoder.dtype).split(cuts, dim=1)
    return [piece for part in parts for piece in getattr(decoder, kind)(part, state)]


def ours(*arguments, **named):
    """fp32 [t, 3, H, W] in [-1, 1]."""
    x = torch.cat(pieces(*arguments, **named)).clamp(-1, 1)
    t, h, w, _ = x.shape
    return x.unflatten(-1, (3, 2, 2)).permute(0, 3, 1, 5, 2, 4).reshape(t, 3, 2 * h, 2 * w)


@WAYS
@pytest.mark.parametrize("latents, h, w", [(1, 3, 5), (2, 4, 3), (3, 3, 3), (5, 2, 5), (9, 3, 2), (2, 2, 1)])
def test_equals_diffusers(vae, way, latents, h, w):
    x = normal_latents(latents, h, w)
    expected = theirs(vae, x)
    got = ours(PortableDecoder(vae, torch.float32, always(way)), vae, x, [latents])
    assert got.shape == (4 * latents - 3, 3, 16 * h, 16 * w) and expected.std() > 0.1
    assert (got - expected).abs().max() < TOLERANCE


@pytest.fixture(scope="module")
def expected(vae):
    return theirs(vae, normal_latents(9))


@pytest.mark.parametrize("cuts", [[1, 4, 4], [1, 8], [9], [5, 4]], ids=str)
@pytest.mark.parametrize("plan", [*PLANS[::3], Plan((4, 8, 8, 4), 100_000), CUT], ids=str)
def test_every_plan_of_passes_and_bands(vae, expected, cuts, plan):
    mixed = PortableDecoder(vae, torch.float32, lambda i, o, level: "time_width" if level % 2 else "time")
    assert (ours(mixed, vae, normal_latents(9), cuts, plan) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "base, blocks, changes", [(4, 2, {}), (8, 1, {"dim_mult": [2, 2, 2, 2]}), (4, 1, {"dim_mult": [1, 1, 4, 4]})]
)
def test_widths_and_shortcuts_are_free(base, blocks, changes):
    vae, x = small_vae(base, blocks, **changes), normal_latents(3)
    for way in ("direct", "time", "time_width"):
        assert (
            ours(PortableDecoder(vae, torch.float32, always(way)), vae, x, [3]) - theirs(vae, x)
        ).abs().max() < TOLERANCE


@WAYS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_frames_do_not_depend_on_the_plan(vae, way, dtype):
    """The same bits however the work is cut. Sums in fp64, so that only rounding of ours could show."""
    x = normal_latents(7, 3, 3)  # the last pass holds half a tile at the first level
    decoder = PortableDecoder(vae, dtype, always(way), Reference(torch.float64))
    whole = torch.cat(pieces(decoder, vae, x, [7]))
    assert torch.isfinite(whole).all() and whole.std() > 0.1
    for cuts, plan in (([1, 4, 2], CUT), ([1, 6], Plan((4, 8, 4, 4), 20_000)), ([5, 2], Plan((4, 4, 8, 4), 60_000))):
        assert torch.equal(torch.cat(pieces(decoder, vae, x, cuts, plan)), whole), (cuts, plan)


@WAYS
@pytest.mark.parametrize("ranks", [2, 4])
def test_devices_that_share_the_rows_give_the_same_bits(vae, way, ranks):
    """Also a device with one row, and bands inside a device's share."""
    x = normal_latents(5, 4, 3)
    decoder = PortableDecoder(vae, torch.float16, always(way), Reference(torch.float64))
    whole = torch.cat(pieces(decoder, vae, x, [1, 4]))

    def work(band):
        return torch.cat(pieces(decoder, vae, x[..., band.mine, :], [1, 4], CUT, band))

    assert torch.equal(torch.cat(on_bands(work, 4, ranks), 1), whole)


def test_bytes_are_the_floats_rounded(vae):
    decoder, x = PortableDecoder(vae, torch.float32), normal_latents(3)
    floats = ours(decoder, vae, x, [1, 2])
    frames, flags = zip(*pieces(decoder, vae, x, [1, 2], CUT, kind="frames"), strict=True)
    wanted = (floats / 2 + 0.5).mul(255).round().to(torch.uint8).permute(0, 2, 3, 1)
    difference = torch.cat(frames).int() - wanted.int()
    assert difference.abs().max() <= 1 and (difference != 0).float().mean() < 1e-3
    assert all(flag.item() == 1 for flag in flags)


@WAYS
def test_an_overflow_anywhere_shows_in_the_flag(way):
    """fp16 that overflows in the stream of the first level: infinity becomes NaN in the next norm and stays."""
    vae = small_vae()
    vae.decoder.mid_block.resnets[0].conv2.weight.mul_(1e5)
    decoder = PortableDecoder(vae, torch.float16, always(way))
    flags = [flag.item() for _, flag in pieces(decoder, vae, normal_latents(2, 2, 2), [2], kind="frames")]
    assert 0 in flags


@pytest.mark.parametrize("cuts", [[2, 1], [1, 3, 1], [1, 1, 1]], ids=str)
def test_a_pass_that_would_cut_a_tile_is_refused(vae, cuts):
    decoder = PortableDecoder(vae, torch.float32)
    with pytest.raises(ValueError, match="inside a tile"):
        pieces(decoder, vae, normal_latents(sum(cuts), 2, 2), cuts)


def test_interleaved_requests_do_not_disturb_each_other(vae):
    decoder = PortableDecoder(vae, torch.float32, always("time"))
    a, b = normal_latents(5, 2, 2, seed=1), normal_latents(5, 2, 2, seed=2)
    alone = [torch.cat(pieces(decoder, vae, x, [1, 4])) for x in (a, b)]
    states = [decoder.start(WHOLE), decoder.start(WHOLE)]
    turns = [[], []]
    for part in (slice(0, 1), slice(1, 5)):
        for x, state, out in zip((a, b), states, turns, strict=True):
            out.extend(decoder.run(denormalised(vae, x)[0][:, part], state))
    for out, wanted in zip(turns, alone, strict=True):
        assert torch.equal(torch.cat(out), wanted)


def test_a_cpu_never_meets_triton(vae, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert PortableDecoder(vae, torch.float32).head.kit.passes is reference


class Dry:
    """Computes nothing: what is left of a decode is its memory."""

    name, fuses, workspace = "dry", False, 0

    def __getattr__(self, name):
        return lambda *arguments, **named: None


def full_width():
    """The VAE of the release without its numbers."""
    with torch.device("meta"):
        vae = AutoencoderKLWan(
            **(dict(small_vae().config) | {"base_dim": 160, "decoder_base_dim": 256, "num_res_blocks": 2})
        )
    return vae.requires_grad_(False)


@WAYS
def test_the_peak_is_known_before_it_happens(way):
    """At 704 x 1248 in 16 bit, counted on tensors without memory: the prediction holds and is not far above."""
    decoder = PortableDecoder(full_width(), torch.float16, always(way), Dry(), SimpleNamespace())
    dry = Dry()
    for kit in {id(c.kit): c.kit for c in (decoder.conv_in, decoder.head)}.values():
        object.__setattr__(kit, "passes", dry)
    predicted = []
    for plan in PLANS:
        known = torch.empty(48, 5, 44, 78, dtype=torch.float16, device="meta")
        with Live(known) as live:
            live.seen |= dict.fromkeys(decoder.tensors())
            state = decoder.start(plan)
            for part in known.split([1, 4], dim=1):
                for _ in decoder.frames(part, state):
                    pass
        measured, said = live.peak + decoder.weight_bytes, decoder.peak(plan, 44, 78)
        assert measured <= said < 1.15 * measured, (str(plan), measured / GIB, said / GIB)
        predicted.append(said)
    assert predicted == sorted(predicted, reverse=True)
    assert state.bytes == 2 * decoder._history_bytes(44, 78)


def test_memory_does_not_grow_with_the_number_of_frames(vae):
    peaks = []
    for latents in (9, 17):
        decoder = PortableDecoder(vae, torch.float32, always("time"))
        x = normal_latents(latents, 4, 4)[0]
        with Live(x) as live, torch.no_grad():
            state = decoder.start()
            for part in x.split([1] + [4] * (latents // 4), dim=1):
                for _ in decoder.frames(part, state):
                    pass
        peaks.append(live.peak)
    assert 0 < peaks[1] <= peaks[0]


def test_cudnn_and_the_reference_agree(vae):
    x = normal_latents(5, 2, 3)
    got = [ours(PortableDecoder(vae, torch.float32, always("time"), c), vae, x, [5]) for c in (Cudnn(), Reference())]
    assert (got[0] - got[1]).abs().max() < TOLERANCE


def test_the_table_decides_by_gpu_path_precision_and_layer():
    measured = {"A GPU": {"portable": {"fp16": {"512>512@2": "time_width"}}}}
    known = ways("A GPU", "fp16", measured=measured)
    assert known(512, 512, 2) == "time_width" and known(256, 256, 3) == rule("fp16", 256, 256, 3) == "time"
    assert ways("A GPU", "bf16", measured=measured)(512, 512, 2) == "direct"
    assert ways("A GPU", "fp16", "built", measured)(512, 512, 2) == "time"
    assert ways("Another", "fp16", measured=measured)(512, 512, 2) == "time"
    assert not is_measured("Another", "fp16")

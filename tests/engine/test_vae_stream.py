"""The streaming decoder against diffusers' own, in every way of cutting the work."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.errors import CheckpointError
from engine.vae_stream import DecoderState, Norm, StreamDecoder, _convolve, _four_phases
from tests.engine.wan_vae import denormalised, normal_latents, small_vae, theirs

TOLERANCE = 1e-5  # fp32 against fp32, values in [-1, 1]: the order of summation differs, nothing else


@pytest.fixture(scope="module")
def vae():
    return small_vae()


@pytest.fixture(scope="module")
def decoder(vae):
    return StreamDecoder(vae)


def ours(decoder, vae, latents, plan, state=None):
    """fp32 [t, 3, H, W] in [-1, 1] of normalised latents, decoded in passes of the planned lengths."""
    state, pieces = state or DecoderState(), []
    for part in denormalised(vae, latents)[0].split(plan, dim=1):
        pieces += list(decoder.run(part, state))
    x = torch.cat(pieces).permute(0, 3, 1, 2)
    # Channel 4 c + 2 j + i is colour c at row i, column j of the 2 x 2 pixels: pixel_shuffle wants 4 c + 2 i + j.
    swapped = x.unflatten(1, (3, 2, 2)).transpose(2, 3).flatten(1, 3)
    return F.pixel_shuffle(swapped, 2).clamp(-1, 1)


@pytest.mark.parametrize("frames, h, w", [(1, 3, 5), (2, 5, 7), (3, 3, 5), (5, 5, 3), (9, 3, 5)])
def test_equals_diffusers(vae, decoder, frames, h, w):
    latents = normal_latents(frames, h, w)
    expected = theirs(vae, latents)
    assert expected.std() > 0.1
    got = ours(decoder, vae, latents, [frames])
    assert got.shape == (4 * frames - 3, 3, 16 * h, 16 * w)
    assert (got - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("plan", [[1, 4, 4], [1, 8], [9], [2, 3, 4], [1] * 9], ids=str)
@pytest.mark.parametrize("slice_bytes", [1, 40_000, 1 << 30])
def test_every_way_to_cut_the_work_gives_the_same_frames(vae, plan, slice_bytes):
    latents = normal_latents(9)
    whole = ours(StreamDecoder(vae), vae, latents, [9])
    assert (ours(StreamDecoder(vae, slice_bytes=slice_bytes), vae, latents, plan) - whole).abs().max() < TOLERANCE


@pytest.mark.parametrize("base, blocks", [(4, 2), (16, 1)])
def test_width_and_number_of_blocks_are_free(base, blocks):
    vae, latents = small_vae(base, blocks), normal_latents(3)
    assert (ours(StreamDecoder(vae), vae, latents, [1, 2]) - theirs(vae, latents)).abs().max() < TOLERANCE


@pytest.mark.parametrize("dim_mult", [[2, 2, 2, 2], [1, 1, 4, 4]], ids=str)
def test_shortcuts_find_their_channels_where_width_falls_differently(dim_mult):
    vae, latents = small_vae(4, dim_mult=dim_mult), normal_latents(3)
    assert (ours(StreamDecoder(vae), vae, latents, [1, 2]) - theirs(vae, latents)).abs().max() < TOLERANCE


@pytest.mark.filterwarnings("ignore:TF32")
def test_without_onednn_the_frames_are_the_same(vae, decoder):
    latents = normal_latents(3)
    with torch.backends.mkldnn.flags(enabled=False):
        plain = ours(decoder, vae, latents, [1, 2])
    assert (plain - theirs(vae, latents)).abs().max() < TOLERANCE


def test_interleaved_requests_do_not_disturb_each_other(vae, decoder):
    a, b = normal_latents(3, seed=1), normal_latents(3, seed=2)
    alone = [ours(decoder, vae, x, [1, 1, 1]) for x in (a, b)]
    states, turns = (DecoderState(), DecoderState()), ([], [])
    for k in range(3):
        for x, state, out in zip((a, b), states, turns, strict=True):
            out.append(ours(decoder, vae, x[:, :, k : k + 1], [1], state))
    for out, expected in zip(turns, alone, strict=True):
        assert torch.equal(torch.cat(out), expected)


def test_the_modules_hold_nothing_of_a_request(vae):
    before = {name: id(value) for name, value in vars(vae).items()}
    latents = normal_latents(2)
    state = DecoderState()
    reference = weakref.ref(state)
    ours(StreamDecoder(vae), vae, latents, [1, 1], state)
    assert {name: id(value) for name, value in vars(vae).items()} == before
    del state
    assert reference() is None


def test_a_history_that_is_one_frame_short_shows(vae, decoder, monkeypatch):
    """The tests above can fail: forget the older frame of every history, and the frames are visibly wrong."""

    def forgetful(self, name, buffer):
        self.history[name] = buffer[-2:].clone()
        self.history[name][0] = 0

    latents = normal_latents(9)
    monkeypatch.setattr(DecoderState, "remember", forgetful)
    error = (ours(decoder, vae, latents, [1, 4, 4]) - theirs(vae, latents)).abs().max()
    assert error > 1000 * TOLERANCE


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that were made under it and still live, and the peak."""

    def __init__(self, known):
        super().__init__()
        self.seen, self.now, self.peak = {known.untyped_storage()._cdata: None}, 0, 0

    def _gone(self, key, size):
        self.seen.pop(key, None)
        self.now -= size

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if key not in self.seen:
                    self.seen[key] = weakref.finalize(storage, self._gone, key, size)
                    self.now += size
                    self.peak = max(self.peak, self.now)
        return out


def peak_bytes(decoder, latents, plan):
    state = DecoderState()
    parts = latents[0].split(plan, dim=1)
    with Live(latents) as live:
        for part in parts:
            for _ in decoder.run(part, state):
                pass
    return live.peak


def test_memory_does_not_grow_with_the_number_of_frames(decoder):
    short, long = normal_latents(9, 4, 4), normal_latents(17, 4, 4)
    assert 0 < peak_bytes(decoder, long, [1, 4, 4, 4, 4]) <= peak_bytes(decoder, short, [1, 4, 4])


def test_a_history_is_two_frames_and_nothing_more(decoder):
    state = DecoderState()
    for part in normal_latents(5)[0].split([1, 4], dim=1):
        for _ in decoder.run(part, state):
            pass
    assert len(state.history) == 24
    for name, frames in state.history.items():
        assert len(frames) == 2 and frames.untyped_storage().nbytes() == frames.nbytes, name


def test_smaller_slices_take_less_memory(vae):
    latents = normal_latents(5, 4, 4)
    small, large = (peak_bytes(StreamDecoder(vae, slice_bytes=size), latents, [1, 4]) for size in (1, 1 << 30))
    assert small < 0.4 * large


@pytest.mark.parametrize(
    "key, value",
    [
        ("z_dim", 16),
        ("patch_size", None),
        ("is_residual", False),
        ("attn_scales", [1.0]),
        ("out_channels", 3),
        ("temperal_downsample", [True, True, False]),
    ],
)
def test_another_layout_is_refused_in_words(vae, key, value):
    class Other(torch.nn.Module):
        config = dict(vae.config) | {key: value}

    with pytest.raises(CheckpointError, match=f"{key} = .*Wan 2.2"):
        StreamDecoder(Other())


def test_four_phases_equal_doubling_then_convolving():
    weight, x = torch.randn(5, 3, 3, 3), torch.randn(2, 3, 4, 6)
    expected = F.conv2d(F.interpolate(x, scale_factor=2, mode="nearest-exact"), weight, padding=1)
    z = _convolve(x.permute(0, 2, 3, 1).contiguous(), _four_phases(weight), torch.zeros(20), 1, 1)
    for p in (0, 1):
        for q in (0, 1):
            k = 5 * (2 * p + q)
            phase = z[:, p : p + 4, q : q + 6, k : k + 5].permute(0, 3, 1, 2)
            assert torch.allclose(phase, expected[:, :, p::2, q::2], atol=1e-5)


class Copies(TorchDispatchMode):
    """Counts the whole-tensor copies that a layout makes necessary."""

    made = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.made += func.overloadpacket in (torch.ops.aten.clone, torch.ops.aten._to_copy)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("frames", [3, 6])
def test_the_fast_convolution_keeps_the_layout(frames):
    x, weight = torch.randn(frames, 4, 6, 16), torch.randn(16, 16, 3, 3, 3)
    with Copies() as copies:
        y = _convolve(x, weight, torch.zeros(16), 1, 1)
    assert y.is_contiguous() and copies.made == 0


@pytest.mark.parametrize("dtype, size", [(torch.float16, 3e4), (torch.bfloat16, 1e15), (torch.float32, 1e15)])
def test_the_norm_does_not_overflow(vae, dtype, size):
    norm = Norm(vae.decoder.norm_out, dtype)
    x = torch.full((2, 3, 3, 8), size, dtype=dtype)
    out = norm.into(torch.empty_like(x), x)
    expected = vae.decoder.norm_out.gamma.flatten().expand_as(out)
    assert torch.allclose(out.float(), expected, rtol=0.02)


def test_the_norm_of_nothing_is_nothing(vae):
    norm, x = Norm(vae.decoder.norm_out, torch.float32), torch.zeros(1, 1, 1, 8)
    assert torch.equal(norm.into(torch.empty_like(x), x), x)

"""Previews: exact where decoding is linear, kept and mended, at a bounded cost, and never to the harm of a video."""

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from engine import preview
from engine.cache import user_cache
from engine.denoise import Step, denoise
from engine.engine import Engine
from engine.errors import EngineError
from engine.events import PreviewReady, StageEnded, VideoFinished, Warned
from engine.preview import SUB, LinearMap, Previews, fit, patches_of
from engine.schedule import build_scheduler
from engine.settings import DenoiseSettings

P = 3 * SUB * SUB


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def draw(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some_map(value=0.0):
    return LinearMap(torch.zeros(2, 48, P), torch.full((2, P), value))


def test_a_linear_map_is_found_exactly():
    weight, bias, latents = draw(0, 48, P), draw(1, P), draw(2, 400, 48)
    found = fit(latents, latents @ weight + bias, ridge=0.0)
    torch.testing.assert_close(found[0], weight, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], bias, atol=1e-5, rtol=1e-5)


def test_a_direction_that_no_scene_shows_stays_small():
    latents = draw(0, 400, 48)
    latents[:, 7] = 1e-6 * draw(1, 400)
    weight, _ = fit(latents, draw(2, 400, P))
    assert weight[7].abs().max() < 1e-3


def test_pixels_stand_where_their_latents_stood():
    """Frame, row, column and channel of one latent position, for a map that only copies."""
    weight = torch.zeros(2, 48, P)
    weight[:, torch.arange(48), torch.arange(48)] = 1
    latents = torch.full((1, 48, 3, 2, 5), -1.0)
    latents[0, (1 * SUB + 2) * SUB + 3, 2, 1, 4] = 1  # green, third row and fourth column of its patch
    frames = LinearMap(weight, torch.zeros(2, P))(latents.transpose(3, 4).contiguous().transpose(3, 4))
    assert frames.shape == (3, 2 * SUB, 5 * SUB, 3) and frames.dtype == np.uint8
    assert np.argwhere(frames == 255).tolist() == [[2, 1 * SUB + 2, 4 * SUB + 3, 1]]


def test_patches_and_frames_are_inverse_and_later_frames_are_means():
    frames = draw(3, 9, 3, 32, 48).clamp(-1, 1)
    patches = patches_of(frames)
    assert patches.shape == (3, 2 * 3, P)
    weight = torch.eye(48).expand(2, 48, 48)
    shown = LinearMap(weight, torch.zeros(2, P))(patches.view(3, 2, 3, P).permute(3, 0, 1, 2)[None])
    size = 16 // SUB
    for index, part in enumerate((frames[:1], frames[1:5], frames[5:9])):
        small = part.mean(0).view(3, 32 // size, size, 48 // size, size).mean((2, 4))
        expected = small.div(2).add(0.5).mul(255).permute(1, 2, 0)
        assert np.abs(shown[index].astype(float) - expected.numpy()).max() <= 0.51


def test_the_first_frame_has_a_map_of_its_own():
    linear = LinearMap(torch.zeros(2, 48, P), torch.stack((torch.full((P,), -1.0), torch.full((P,), 1.0))))
    shown = linear(draw(0, 1, 48, 2, 2, 2))
    assert shown[0].max() == 0 and shown[1].min() == 255


class Straight:
    """A model whose flow is straight, so that every step knows where it ends."""

    device = torch.device("cpu")

    def __init__(self, noise, end):
        self.noise, self.end = noise, end

    def prepare(self, *_):
        return None

    def velocity(self, latents, k, prepared, *_):
        return self.noise - self.end


def test_every_step_of_a_straight_flow_shows_its_end(toy_checkpoint):
    from diffusers import FlowMatchEulerDiscreteScheduler

    noise, end = draw(0, 2, 48, 2, 4, 6), draw(1, 2, 48, 2, 4, 6)
    scheduler = build_scheduler(FlowMatchEulerDiscreteScheduler(shift=9.0), 5)
    steps = list(
        denoise(Straight(noise, end), draw(2, 1, 3, 8), None, torch.zeros(2, 49, 2, 4, 6), noise, scheduler, 1)
    )
    assert len(steps) == 5
    for step in steps:
        torch.testing.assert_close(step.clean, end, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(steps[-1].latents, end, atol=1e-5, rtol=1e-5)


# ---- the map of a VAE, and where it is kept


@pytest.fixture(scope="module")
def vae(toy_checkpoint):
    from engine.checkpoint import load_vae

    return load_vae(toy_checkpoint, torch.device("cpu"), torch.float32, lambda *_: None)


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(preview, "SCENES", 2)
    monkeypatch.setattr(preview, "SCENE_SIDE", 64)


def test_the_map_is_made_once_for_a_hash_and_a_damaged_file_is_a_miss(vae, few, cache, monkeypatch, caplog):
    made = []
    fit_to = preview.fit_to
    monkeypatch.setattr(preview, "fit_to", lambda vae: made.append(1) or fit_to(vae))
    first, again = preview.map_for(vae, "a" * 64), preview.map_for(vae, "a" * 64)
    assert torch.equal(first.weight, again.weight) and torch.equal(first.bias, again.bias) and len(made) == 1
    preview.map_for(vae, "b" * 64)
    assert len(made) == 2
    (path,) = cache.glob("*aaaa*")
    whole = path.read_bytes()
    wrong = {"weight": torch.zeros(1), "bias": torch.zeros(1)}
    endless = {"weight": first.weight * float("nan"), "bias": first.bias}
    for damage in (lambda: path.write_bytes(whole[: len(whole) // 2]), lambda: path.write_bytes(b""),
                   lambda: save_file(wrong, path), lambda: save_file(endless, path)):  # fmt: skip
        damage()
        made.clear()
        assert torch.equal(preview.map_for(vae, "a" * 64).weight, first.weight)
        assert made == [1] and path.read_bytes() == whole
    assert "made again" in caplog.text and not list(cache.glob("*.part"))


def test_a_cache_that_can_not_be_written_costs_only_time(vae, few, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE", str(tmp_path / "file" / "below"))
    assert torch.isfinite(preview.map_for(vae, "a" * 64).weight).all()
    assert "not kept" in caplog.text


def test_the_cache_is_closed_to_others_and_follows_the_environment(tmp_path, monkeypatch):
    assert user_cache().stat().st_mode & 0o077 == 0
    monkeypatch.delenv("ENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert user_cache() == tmp_path / "xdg" / "pan2-demo"


def test_the_fit_explains_what_its_vae_decodes(vae, monkeypatch):
    """On a scene that it was not fitted to, the map is closer than the mean colour is."""
    from engine.condition import encode_image
    from engine.decode import float_frames

    monkeypatch.setattr(preview, "SCENE_SIDE", 64)
    *known, held_out = list(preview.scenes())
    monkeypatch.setattr(preview, "scenes", lambda: iter(known))
    linear = preview.fit_to(vae)
    latents = encode_image(vae, held_out)
    truth = patches_of(torch.cat(list(float_frames(vae, latents))))
    which = torch.tensor([0, 1, 1])
    inputs = latents[0].movedim(0, -1).flatten(1, 2)
    shown = torch.einsum("fnc,fcp->fnp", inputs, linear.weight[which]) + linear.bias[which][:, None]
    assert (shown - truth).square().mean() < 0.5 * truth.var()


# ---- a run


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self):
        return self.now


def steps_of(previews, clock, seconds, count):
    """The steps after which there was a preview."""
    events = []
    for k in range(1, count + 1):
        clock.now += seconds
        events += previews.after(Step(k, count, seconds, torch.zeros(1, 48, 1, 2, 2), torch.zeros(1, 48, 1, 2, 2)))
    return [event.step for event in events if isinstance(event, PreviewReady)], events


def test_quick_steps_have_few_previews_and_slow_ones_many(tmp_path):
    clock = Clock()
    assert steps_of(Previews(some_map(), tmp_path, 24, clock), clock, 0.125, 50)[0] == [8, 16, 24, 32, 40, 48]
    assert steps_of(Previews(some_map(), tmp_path, 24, clock), clock, 5.0, 6)[0] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("cost", [0.03, 0.2, 2.0])
def test_previews_take_two_in_a_hundred_of_the_time_at_most(tmp_path, cost):
    clock = Clock()

    def slow(latents):
        clock.now += cost
        return some_map()(latents)

    shown, _ = steps_of(Previews(slow, tmp_path, 24, clock), clock, 2.0, 200)
    assert 0 < len(shown) * cost <= 0.02 * clock.now + cost


def test_the_file_is_a_small_animation_of_all_latent_frames(tmp_path):
    path = tmp_path / "a.webp"
    preview.write_animation(
        path, np.zeros((13, 200, 700, 3), np.uint8) + np.arange(13, dtype=np.uint8)[:, None, None, None] * 9, 4 / 24
    )
    with Image.open(path) as picture:
        assert (picture.format, picture.n_frames, picture.info["loop"]) == ("WEBP", 13, 0)
        assert picture.size == (320, 91)
        picture.seek(1)
        picture.load()
        assert picture.info["duration"] == 167
    assert [file.name for file in tmp_path.iterdir()] == ["a.webp"]


def test_no_map_means_no_preview(tmp_path):
    clock = Clock()
    assert steps_of(Previews(None, tmp_path, 24, clock), clock, 5.0, 6) == ([], [])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), OSError("disk full"), ValueError("x")])
def test_a_failure_is_said_once_and_ends_only_the_previews(tmp_path, caplog, error):
    def fails(_):
        raise error

    clock = Clock()
    _, events = steps_of(Previews(fails, tmp_path, 24, clock), clock, 5.0, 6)
    assert len(events) == 1 and isinstance(events[0], Warned) and str(error) in events[0].text
    assert "no preview after step 1" in caplog.text


@pytest.fixture
def engine(toy_preset, few, monkeypatch):
    monkeypatch.setattr(preview, "SECONDS_APART", 0.0)
    monkeypatch.setattr(preview, "SHARE", 1e9)
    made = Engine(toy_preset, "cpu")
    yield made
    made.close()


def events_of(engine, folder, **values):
    return list(engine.generate(engine.preset.request(steps=4, **values), folder))


def test_a_run_shows_where_it_goes_before_it_decodes(engine, tmp_path):
    events = events_of(engine, tmp_path)
    shown = [event for event in events if isinstance(event, PreviewReady)]
    assert [(event.step, event.steps) for event in shown] == [(1, 4), (2, 4), (3, 4)]
    end = next(event for event in events if isinstance(event, StageEnded) and event.stage == "denoise")
    assert events.index(shown[-1]) < events.index(end)
    assert not [event for event in events if isinstance(event, Warned)]


def test_previews_change_no_byte_of_the_video_and_can_be_switched_off(engine, tmp_path):
    with_ = events_of(engine, tmp_path / "a")[-1].stats["latents_sha256"]
    events = events_of(engine, tmp_path / "b", denoise=DenoiseSettings(preview="off"))
    assert not [event for event in events if isinstance(event, PreviewReady)]
    assert events[-1].stats["latents_sha256"] == with_
    assert not (tmp_path / "b" / preview.PREVIEW_NAME).exists()


def test_a_map_that_can_not_be_made_costs_the_previews_alone(engine, tmp_path, monkeypatch):
    def fails():
        raise EngineError("no encoder")

    monkeypatch.setattr(engine.executor, "preview_map", fails)
    events = events_of(engine, tmp_path)
    assert [event.text for event in events if isinstance(event, Warned)] == [
        "There are no previews of this video, which is not affected; the log says why."
    ]
    assert isinstance(events[-1], VideoFinished) and engine.readiness().state == "ready"

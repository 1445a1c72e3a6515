import json
import threading
from pathlib import Path

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from safetensors import safe_open

from engine.condition import denormalise, make_condition, normalise
from engine.denoise import denoise
from engine.errors import Cancelled, EngineError, RequestError
from engine.mmdit import PAN2Transformer3DModel
from engine.schedule import build_scheduler

DATA = Path(__file__).parents[1] / "data"
MAX_ABS, REL_L2 = 2.5e-4, 4e-5


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models here are so small that a second thread only waits: on a busy machine it costs fifty times the work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Golden:
    def __init__(self, name):
        with safe_open(DATA / f"sampler_{name}.safetensors", "pt") as file:
            self.meta = file.metadata()
            self.tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        self.steps, self.shift = int(self.meta["steps"]), float(self.meta["shift"])
        self.guidance = float(self.meta["guidance_scale"])
        self.stats = {key: self.tensors[key].tolist() for key in ("latents_mean", "latents_std")}
        self.model = PAN2Transformer3DModel(**json.loads(self.meta["config"])).eval()
        weights = {k.removeprefix("weights."): v for k, v in self.tensors.items() if k.startswith("weights.")}
        self.model.load_state_dict(weights, strict=True)

    def __getitem__(self, key):
        return self.tensors[key]

    def scheduler(self):
        return build_scheduler(FlowMatchEulerDiscreteScheduler(shift=self.shift), self.steps)

    def run(self, model=None, **changes):
        arguments = {
            "prompt": self["inputs.prompt_embeds"],
            "negative": self["inputs.negative_prompt_embeds"],
            "condition": self["inputs.condition"],
            "noise": self["inputs.noise_latents"],
            "scheduler": self.scheduler(),
            "guidance": self.guidance,
        } | changes
        return denoise(model or self.model, **arguments)


@pytest.fixture(scope="module")
def t2v():
    return Golden("t2v")


@pytest.fixture(scope="module")
def i2v():
    return Golden("i2v")


@pytest.fixture(params=["t2v", "i2v"])
def golden(request):
    return request.getfixturevalue(request.param)


def assert_near(value, expected, max_abs=MAX_ABS, rel_l2=REL_L2):
    difference = (value.double() - expected.double()).abs()
    assert difference.max() <= max_abs, f"max abs {difference.max():.2e} at {difference.argmax()}"
    relative = difference.norm() / expected.double().norm()
    assert relative <= rel_l2, f"relative L2 {relative:.2e}"


def test_every_step_is_the_golden_one(golden):
    steps = list(golden.run())
    assert [step.k for step in steps] == [1, 2, 3, 4]
    assert all(step.steps == 4 and step.seconds > 0 for step in steps)
    for step, expected in zip(steps, golden["intermediates.latents_per_step"][1:], strict=True):
        assert step.latents.dtype == torch.float32
        assert_near(step.latents, expected)


def test_final_latents_are_the_exact_ones_before_and_after_denormalising(golden):
    *_, last = golden.run()
    assert_near(last.latents, golden["output_exact"])
    assert_near(denormalise(last.latents, golden.stats), golden["output_denormalised"])


def test_condition_of_the_first_frame_is_the_golden_one(i2v):
    latents = normalise(i2v["inputs.image_latents_raw"], i2v.stats)
    torch.testing.assert_close(latents, i2v["intermediates.image_latents_normalised"], rtol=0, atol=1e-6)
    condition = make_condition(i2v["inputs.noise_latents"].shape[1:], latents)
    torch.testing.assert_close(condition, i2v["inputs.condition"], rtol=0, atol=1e-6)


class Linear:
    """A model whose velocity is known: counts its calls and answers with `velocities[text]` in `dtype`."""

    device = torch.device("cpu")

    def __init__(self, positive, negative, dtype=torch.float32):
        self.velocities, self.dtype = {1.0: positive, -1.0: negative}, dtype
        self.prepared, self.calls = [], []

    def prepare(self, text, condition, sigmas):
        self.prepared.append(text.shape)
        return text[0, 0, 0].item()

    def velocity(self, latents, k, prepared, cache=None):
        self.calls.append((k, prepared))
        return torch.full_like(latents, self.velocities[prepared], dtype=self.dtype)


def run_linear(model, guidance, negative=True, steps=2, as_list=True, **changes):
    text = torch.ones(1, 3, 4)
    scheduler = build_scheduler(FlowMatchEulerDiscreteScheduler(shift=9.0), steps)
    noise = torch.zeros(1, 2, 1, 2, 2)
    arguments = {"condition": make_condition((2, 1, 2, 2)), "noise": noise, "scheduler": scheduler} | changes
    run = denoise(model, text, -text if negative else None, guidance=guidance, **arguments)
    return list(run) if as_list else run


@pytest.mark.parametrize("guidance", [1.0, 0.5, 0.0, -1.0])
def test_without_guidance_one_call_a_step_and_no_negative_prompt(guidance):
    model = Linear(3.0, float("nan"))
    *_, last = run_linear(model, guidance, negative=False)
    assert model.calls == [(0, 1.0), (1, 1.0)]
    torch.testing.assert_close(last.latents, torch.full_like(last.latents, -3.0))


def test_guidance_moves_away_from_the_negative_prompt():
    model = Linear(3.0, 1.0)
    *_, last = run_linear(model, 2.5)
    assert model.calls == [(0, 1.0), (0, -1.0), (1, 1.0), (1, -1.0)]
    torch.testing.assert_close(last.latents, torch.full_like(last.latents, -(1 + 2.5 * 2)))


def test_guidance_is_combined_in_the_models_dtype_and_latents_stay_float32():
    model = Linear(1.0, 0.3, torch.bfloat16)
    expected = torch.tensor(0.3).bfloat16() + 1.7 * (torch.tensor(1.0).bfloat16() - torch.tensor(0.3).bfloat16())
    assert expected.float() != pytest.approx(0.3 + 1.7 * 0.7, abs=1e-4)
    first, last = run_linear(model, 1.7)
    assert last.latents.dtype == torch.float32
    # sigma falls from 1 to 0.9 in the first step, which bf16 latents could not follow
    torch.testing.assert_close(first.latents, torch.full_like(first.latents, -0.1 * expected.item()), rtol=1e-5, atol=0)


def test_bf16_weights_stay_near_the_golden_run_with_float32_latents(t2v):
    model = PAN2Transformer3DModel(**json.loads(t2v.meta["config"])).eval()
    model.load_state_dict(t2v.model.state_dict())
    model.to(torch.bfloat16)
    *_, last = t2v.run(model)
    assert last.latents.dtype == torch.float32
    assert_near(last.latents, t2v["output_exact"], max_abs=0.3, rel_l2=0.03)


def test_two_videos_of_one_prompt_equal_two_runs(t2v):
    other = t2v["inputs.noise_latents"].flip(-1)
    noise = torch.cat([t2v["inputs.noise_latents"], other])
    *_, both = t2v.run(noise=noise, condition=t2v["inputs.condition"].expand(2, -1, -1, -1, -1))
    *_, second = t2v.run(noise=other)
    assert_near(both.latents[:1], t2v["output_exact"])
    assert_near(both.latents[1:], second.latents, max_abs=1e-4, rel_l2=1e-5)


def test_cancel_is_read_between_steps(t2v):
    cancel = threading.Event()
    run = t2v.run(cancel=cancel)
    first = next(run)
    cancel.set()
    with pytest.raises(Cancelled, match="after 1 of 4"):
        next(run)
    torch.testing.assert_close(first.latents, t2v["intermediates.latents_per_step"][1], rtol=0, atol=MAX_ABS)


def test_a_run_cancelled_beforehand_does_no_work():
    cancel = threading.Event()
    cancel.set()
    model = Linear(1.0, 1.0)
    with pytest.raises(Cancelled, match="after 0 of 2"):
        run_linear(model, 2.5, cancel=cancel)
    assert model.prepared == model.calls == []


def test_values_that_are_not_finite_end_the_run_with_the_step_named():
    class Breaks(Linear):
        def velocity(self, latents, k, prepared, cache=None):
            answer = super().velocity(latents, k, prepared)
            answer[0, 0, 0, 0, 0] = float("inf") if k == 1 else 0.0
            return answer

    model = Breaks(1.0, 1.0)
    with pytest.raises(EngineError, match=r"step 2 of 3 \(sigma 0.9474, model output in torch.float32\)"):
        run_linear(model, 1.0, steps=3)
    assert [k for k, _ in model.calls] == [0, 1]


def test_gradients_are_off_in_the_loop_and_as_before_outside_it():
    class Trainable(Linear):
        scale = torch.nn.Parameter(torch.ones(()))

        def velocity(self, latents, k, prepared, cache=None):
            return self.scale * super().velocity(latents, k, prepared)

    for step in run_linear(Trainable(1.0, 2.0), 2.5, as_list=False):
        assert torch.is_grad_enabled()
        assert not step.latents.requires_grad


def test_inputs_are_left_as_they_were(t2v):
    before = t2v["inputs.noise_latents"].clone()
    list(t2v.run())
    assert torch.equal(t2v["inputs.noise_latents"], before)


@pytest.mark.parametrize("guidance", [float("nan"), float("inf")])
def test_guidance_that_is_no_number_is_refused(guidance):
    with pytest.raises(RequestError, match=r"guidance = .* finite"):
        run_linear(Linear(1.0, 1.0), guidance)


def test_guidance_without_a_negative_prompt_is_refused():
    with pytest.raises(RequestError, match="needs a negative prompt"):
        run_linear(Linear(1.0, 1.0), 2.5, negative=False)


def test_a_scheduler_serves_one_run(t2v):
    scheduler = t2v.scheduler()
    list(t2v.run(scheduler=scheduler))
    with pytest.raises(ValueError, match="has run already"):
        list(t2v.run(scheduler=scheduler))

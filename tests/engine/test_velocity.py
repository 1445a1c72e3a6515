import copy

import pytest
import torch
from golden_case import BF16, Case, assert_near, random_inputs, split

from engine.mmdit import SCHEDULES_KEPT, PAN2Transformer3DModel

SIGMAS = [1.0, 0.9, 0.47, 0.0]


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that a second thread only waits for the first."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def batch2():
    return Case("tf_batch2")


def plain(model, latents, condition, text, sigma):
    timestep = torch.full((len(latents),), 1000 * sigma)
    with torch.no_grad():
        return model(torch.cat((latents, condition), dim=1), timestep, text)


@pytest.mark.parametrize("sigmas", [SIGMAS, [0.99774, 0.123456, 0.0]], ids=["three steps", "two steps"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("grid", [(2, 8, 8), (3, 4, 10)])
def test_velocity_equals_the_plain_call(batch2, batch, grid, sigmas):
    model = batch2.model()
    latents, condition, text = random_inputs(model, batch, *grid)
    prepared = model.prepare(text, condition, sigmas)
    for k, sigma in enumerate(sigmas):
        velocity = model.velocity(latents, k, prepared)
        assert_near(velocity, plain(model, latents, condition, text, sigma), max_abs=1e-5, rel_l2=2e-6)
    assert not torch.allclose(model.velocity(latents, 0, prepared), model.velocity(latents, 1, prepared), atol=1e-2)


@pytest.mark.parametrize("name", ["tf_realchan", "tf_tscale1", "tf_deep"])
def test_velocity_of_a_golden_case(name):
    case = Case(name)
    model, (hidden_states, timestep, text) = case.model(), case.inputs
    latents, condition = split(hidden_states, model.config.out_channels)
    prepared = model.prepare(text, condition, [timestep.item() / 1000])
    assert_near(model.velocity(latents, 0, prepared), case["output_exact"], max_abs=2e-5, rel_l2=4e-6)


def test_velocity_in_bf16_with_float32_latents():
    case = Case("tf_hd128")
    model, (hidden_states, timestep, text) = case.model().cast(torch.bfloat16), case.inputs
    latents, condition = split(hidden_states)
    velocity = model.velocity(latents, 0, model.prepare(text, condition, [timestep.item() / 1000]))
    assert velocity.dtype == torch.bfloat16
    assert_near(velocity, case["output_exact"], **BF16)


def test_prepared_runs_do_not_disturb_each_other(batch2):
    model = batch2.model()
    latents, condition, text = random_inputs(model)
    first = model.prepare(text, condition, SIGMAS)
    expected = model.velocity(latents, 1, first)
    other = random_inputs(model, batch=2, frames=2, height=6, width=4, tokens=3)
    second = model.prepare(other[2], other[1], [1.0, 0.3, 0.0])
    model.velocity(other[0], 1, second)
    assert torch.equal(model.velocity(latents, 1, first), expected)


# ---- modulations kept by schedule


def count_norm1(model):
    calls = []
    for block in model.transformer_blocks:
        block.norm1.register_forward_hook(lambda *_: calls.append(1))
    return calls


def test_a_schedule_is_computed_once(batch2):
    model = batch2.model()
    calls, blocks = count_norm1(model), len(model.transformer_blocks)
    latents, condition, text = random_inputs(model)
    prepared = model.prepare(text, condition, SIGMAS)
    assert len(calls) == blocks
    model.prepare(random_inputs(model, tokens=2)[2], condition, torch.tensor(SIGMAS).tolist())
    assert len(calls) == 2 * blocks  # 0.9 as float32 is another number
    model.prepare(random_inputs(model, tokens=2)[2], condition, tuple(SIGMAS))
    for k in range(len(SIGMAS)):
        model.velocity(latents, k, prepared)
    assert len(calls) == 2 * blocks


def test_few_schedules_are_kept_and_the_last_used_one_stays(batch2):
    model = batch2.model()
    calls, blocks = count_norm1(model), len(model.transformer_blocks)
    for n in range(SCHEDULES_KEPT + 1):
        model.modulations([1.0, n / 10])
        model.modulations(SIGMAS)
    assert len(calls) == (SCHEDULES_KEPT + 2) * blocks
    assert len(model._schedules) == SCHEDULES_KEPT


def change_by_loading(model):
    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})


def change_by_assigning(model):
    model.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def change_in_place(model):
    with torch.no_grad():
        model.transformer_blocks[1].norm1.linear.bias.add_(1)


def change_a_part(model):
    model.time_embedder.load_state_dict({k: 1.5 * v for k, v in model.time_embedder.state_dict().items()})


def change_by_rounding(model):
    model.to(torch.bfloat16).to(torch.float32)


def change_silently(model):
    model.transformer_blocks[0].norm1.linear.weight.data.mul_(2)
    model.forget_schedules()


CHANGES = [change_by_loading, change_by_assigning, change_in_place, change_a_part, change_by_rounding, change_silently]


@pytest.mark.parametrize("change", CHANGES)
def test_new_weights_never_see_old_modulations(batch2, change):
    model = batch2.model()
    latents, condition, text = random_inputs(model)
    before = model.velocity(latents, 1, model.prepare(text, condition, SIGMAS))
    change(model)
    after = model.velocity(latents, 1, model.prepare(text, condition, SIGMAS))
    assert not torch.allclose(before, after, atol=1e-4)
    assert_near(after, plain(model, latents, condition, text, SIGMAS[1]), max_abs=5e-5, rel_l2=4e-6)


def test_loading_frees_the_kept_modulations(batch2):
    model = batch2.model()
    model.modulations(SIGMAS)
    model.load_state_dict(model.state_dict())
    assert not model._schedules


def test_modulations_hold_no_graph_and_are_float32(batch2):
    model = batch2.model().cast(torch.bfloat16)
    blocks, out = model.modulations(SIGMAS)
    assert all(m.dtype == torch.float32 and not m.requires_grad for m in (*blocks, out))
    assert [tuple(m.shape) for m in (*blocks, out)] == [(4, 192), (4, 192), (4, 64)]


@pytest.mark.gpu
def test_norm1_may_stay_on_the_host():
    case = Case("tf_hd128")
    model, (hidden_states, timestep, text) = case.model().cast(torch.bfloat16), case.inputs
    model.cuda()
    for block in model.transformer_blocks:
        block.norm1.cpu()
    latents, condition = split(hidden_states)
    prepared = model.prepare(text, condition, [timestep.item() / 1000])
    velocity = model.velocity(latents, 0, prepared)
    assert velocity.device.type == "cuda"
    assert_near(velocity.cpu(), case["output_exact"], **BF16)


def test_a_copy_is_its_own_model(batch2):
    model = batch2.model()
    model.modulations(SIGMAS)
    other = copy.deepcopy(model)
    other.load_state_dict({name: 1.5 * tensor for name, tensor in model.state_dict().items()})
    assert model._schedules and not other._schedules


def test_prepare_and_velocity_refuse_too():
    model = PAN2Transformer3DModel(**Case("tf_base").config)
    latents, condition, text = random_inputs(model)
    with pytest.raises(ValueError, match=r"condition has shape \[1, 4, 3, 4, 6\].*5"):
        model.prepare(text, latents, SIGMAS)
    with pytest.raises(ValueError, match=r"text embedding.*\[1, tokens, 16\]"):
        model.prepare(text.expand(2, -1, -1), condition, SIGMAS)
    with pytest.raises(ValueError, match=r"sigmas are \[1000"):
        model.prepare(text, condition, [1000.0, 0.0])
    with pytest.raises(ValueError, match=r"sigmas are \[\]"):
        model.prepare(text, condition, [])
    prepared = model.prepare(text, condition, SIGMAS)
    with pytest.raises(ValueError, match=r"\[1, 4, 3, 4, 4\].*\[1, 4, 3, 4, 6\]"):
        model.velocity(latents[..., :4], 0, prepared)
    with pytest.raises(ValueError, match=r"step 4 .* 4 sigmas"):
        model.velocity(latents, 4, prepared)

import copy
import json
from dataclasses import fields

import pytest
import torch
from golden_case import BF16, DATA, TF_CASES, Case, assert_near, random_inputs, split

from engine.layers import modulate, time_features
from engine.mmdit import MMDiTConfig, PAN2Transformer3DModel, patchify, unpatchify

MAX_ABS, REL_L2 = 1e-5, 1e-6  # allowed are 2.5e-4 and 4e-5; with exact time features and tables this is reached
SMALL = Case("tf_base").config


@pytest.fixture(autouse=True)
def one_thread():
    """These models are so small that a second thread only waits for the first."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=TF_CASES)
def case(request):
    return Case(request.param)


@pytest.fixture(scope="module")
def batch2():
    return Case("tf_batch2")


# ---- the published architecture


def test_all_golden_cases_are_there():
    assert len(TF_CASES) == 8


def test_names_and_shapes_are_the_released_ones():
    release = json.loads((DATA / "release_keys.json").read_text())
    expected = {
        entry["key"].replace("{i}", str(i)): tuple(entry["shape"])
        for entry in release["keys"]
        for i in range(entry["count"])
    }
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**release["config"])
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert len(shapes) == 1418 and shapes == expected
    assert sum(p.numel() for p in model.parameters()) == 29_201_996_992
    assert not list(model.buffers())
    assert model.config == MMDiTConfig()


@torch.no_grad()
def test_output_is_the_exact_one(case):
    output = case.model()(*case.inputs)
    assert output.dtype == torch.float32
    assert_near(output, case["output_exact"], MAX_ABS, REL_L2)


@torch.no_grad()
def test_every_intermediate_is_the_golden_one(case):
    """Says where a wrong output begins. The golden intermediates are a float32 run: its time features cost 6e-5."""
    model, (hidden_states, timestep, text) = case.model(), case.inputs

    def check(name, value):
        assert_near(value, case[f"intermediates.{name}"], max_abs=2.5e-4, rel_l2=6e-5, what=name)

    rope = model.rope(hidden_states.shape)
    x = torch.nn.functional.linear(patchify(hidden_states), model.x_embedder.weight.flatten(1), model.x_embedder.bias)
    temb, c = model.time_embedder(timestep), model.refine(text)
    embedded = model.context_embedder(text)
    check("rope_cos", rope[0])
    check("rope_sin", rope[1])
    check("patch_tokens", x)
    check("patch_tokens", model.x_embedder(hidden_states).flatten(2).transpose(1, 2))
    check("time_proj", time_features(timestep))
    check("time_embedding", temb)
    check("context_embedded", embedded)
    check("context_refined", c - model.context_type_embedding)
    check("context_in", c)
    _check_first_attention(model.transformer_blocks[0], x, c, temb, rope, check)
    for i, block in enumerate(model.transformer_blocks):
        x, c = block(x, c, block.norm1(temb), rope)
        check(f"block{i}.video_out", x)
        check(f"block{i}.context_out", c)
    scale, shift = model.norm_out(temb).chunk(2, dim=-1)
    check("norm_out", modulate(x, shift, scale))


def _check_first_attention(block, x, c, temb, rope, check):
    shift, scale = block.norm1(temb).chunk(6, dim=-1)[:2]
    shift_c, scale_c = block.scale_shift_table_context.chunk(6)[:2]
    x, c, attn = modulate(x, shift, scale), modulate(c, shift_c, scale_c), block.attn
    check("block0.norm1_video", x)
    check("block0.norm1_context", c)
    check("block0.q_rope", attn.project(attn.to_q, attn.norm_q, x, rope))
    check("block0.k_rope", attn.project(attn.to_k, attn.norm_k, x, rope))
    check("block0.q_ctx", attn.project(attn.add_q_proj, attn.norm_added_q, c))
    check("block0.k_ctx", attn.project(attn.add_k_proj, attn.norm_added_k, c))
    x, c = attn(x, c, rope, text_out=True)
    check("block0.attn_out_video", x)
    check("block0.attn_out_context", c)


@torch.no_grad()
def test_the_last_block_without_its_text_gives_the_same_video(batch2):
    model, (hidden_states, timestep, text) = batch2.model(), batch2.inputs
    x, c = torch.randn(2, hidden_states[0, 0].numel() // 4, model.config.dim), model.refine(text)
    block, rope = model.transformer_blocks[-1], model.rope(hidden_states.shape)
    modulation = block.norm1(model.time_embedder(timestep))
    whole, skipped = block(x, c, modulation, rope), block(x, c, modulation, rope, text_out=False)
    assert_near(skipped[0], whole[0], max_abs=1e-5, rel_l2=1e-6)
    assert skipped[1] is None and whole[1] is not None
    calls = []
    block.ff_context.register_forward_hook(lambda *_: calls.append("ff_context"))
    block.attn.add_q_proj.register_forward_hook(lambda *_: calls.append("add_q_proj"))
    model(*batch2.inputs)
    assert not calls


def test_patches_and_back():
    x = torch.randn(2, 3, 2, 4, 6)
    patches = patchify(x)
    assert torch.equal(patches[1, 6 + 3 + 1], x[1, :, 1, 2:4, 2:4].flatten())
    assert torch.equal(unpatchify(patches, x.shape), x)


# ---- dtypes


@pytest.mark.parametrize("norm1", [torch.float32, torch.bfloat16], ids=["norm1 as released", "all bf16"])
@torch.no_grad()
def test_bf16(norm1):
    case = Case("tf_hd128")
    model = case.model().cast(torch.bfloat16)
    for block in model.transformer_blocks:
        block.norm1.to(norm1)
    output = model(*case.inputs)
    assert output.dtype == torch.bfloat16
    assert_near(output, case["output_exact"], **BF16)
    assert torch.cosine_similarity(output.flatten().double(), case["output_exact"].flatten().double(), dim=0) > 0.999


def test_cast_keeps_norm1_in_float32():
    model = PAN2Transformer3DModel(**SMALL).to(torch.bfloat16).cast(torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".norm1.linear." in name else torch.bfloat16), name


@torch.no_grad()
def test_autocast_keeps_the_streams_in_float32():
    case = Case("tf_hd128")
    model, streams = case.model(), []
    model.transformer_blocks[0].register_forward_pre_hook(lambda _, arguments: streams.extend(arguments[:2]))
    with torch.autocast("cpu", torch.bfloat16):
        output = model(*case.inputs)
        prepared = model.prepare(case.input("encoder_hidden_states"), split(case.input("hidden_states"))[1], [0.5])
        model.velocity(split(case.input("hidden_states"))[0], 0, prepared)
    assert [stream.dtype for stream in streams] == [torch.float32] * 4
    assert output.dtype == torch.float32
    assert_near(output, case["output_exact"], **BF16)


# ---- training


def test_gradients_reach_every_weight_that_matters(batch2):
    model = batch2.model().train()
    model(*batch2.inputs).square().mean().backward()
    last = f"transformer_blocks.{model.config.num_layers - 1}."
    unused = {"attn.add_q_proj", "attn.norm_added_q", "attn.to_add_out", "ff_context"}
    for name, parameter in model.named_parameters():
        if any(name.startswith(last + part) for part in unused):
            assert parameter.grad is None, name
        else:
            assert parameter.grad.isfinite().all() and parameter.grad.any(), name


def test_gradient_is_the_slope(batch2):
    model = batch2.model()
    direction = {name: torch.randn_like(p) * p.detach().std() for name, p in model.named_parameters() if p.numel() > 64}
    target = batch2["output_exact"].roll(1, dims=-1)

    def loss():
        return (model(*batch2.inputs) - target).square().mean()

    loss().backward()
    used = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    slopes = [(used[name] * direction[name]).sum() for name in used.keys() & direction.keys()]
    values, h = [], 2e-3
    for sign in (1, -1):
        with torch.no_grad():
            moved = copy.deepcopy(model)
            for name, parameter in moved.named_parameters():
                if name in direction:
                    parameter.add_(direction[name], alpha=sign * h)
            values.append((moved(*batch2.inputs) - target).square().mean())
    torch.testing.assert_close((values[0] - values[1]) / (2 * h), sum(slopes), rtol=2e-2, atol=0)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_fresh_model_learns(autocast):
    torch.manual_seed(0)
    model = PAN2Transformer3DModel(**SMALL)
    latents, condition, text = random_inputs(model, batch=2)
    inputs = torch.cat((latents, condition), dim=1), torch.tensor([900.0, 200.0]), text
    assert not model(*inputs).any()
    target = latents.roll(1, dims=-1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (model(*inputs) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow  # the compiler's import
@torch.no_grad()
def test_a_block_compiles_as_one_graph_for_all_sizes(batch2):
    model = batch2.model()
    block = model.transformer_blocks[0]
    compiled = torch.compile(block, dynamic=True, fullgraph=True, backend="eager")
    for frames, tokens in ((2, 5), (3, 7)):
        latents, _, text = random_inputs(model, frames=frames, tokens=tokens)
        x, rope = torch.randn(1, frames * 6, model.config.dim), model.rope(latents.shape)
        arguments = x, model.refine(text), block.norm1(model.time_embedder(torch.tensor([300.0]))), rope
        for value, expected in zip(compiled(*arguments), block(*arguments), strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-5)


# ---- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_axes_dim": [4, 6, 8]}, ["rope_axes_dim", "18", "attention_head_dim = 16"]),
        ({"rope_axes_dim": [3, 7, 6]}, ["(3, 7, 6)", "even"]),
        ({"rope_axes_dim": [8, 8]}, ["(8, 8)", "3 values"]),
        ({"in_channels": 10}, ["in_channels is 10", "9"]),
        ({"patch_size": [2, 2, 2]}, ["patch_size is (2, 2, 2)", "(1, 2, 2)"]),
        ({"num_layers": 0}, ["num_layers is 0", "positive"]),
        ({"num_refiner_layers": -1}, ["num_refiner_layers is -1", "positive"]),
        ({"mlp_ratio": 0.0}, ["mlp_ratio is 0.0", "positive"]),
        ({"mlp_ratio": 0.001}, ["mlp_ratio is 0.001", "32"]),
        ({"rope_theta": float("nan")}, ["rope_theta is nan"]),
        ({"num_layers": 2.5}, ["num_layers is 2.5", "int"]),
        ({"text_embed_dim": "16"}, ["text_embed_dim is '16'"]),
        ({"num_attention_heads": True}, ["num_attention_heads is True"]),
        ({"layers": 4}, ["unknown", "layers", "num_layers"]),
    ],
)
def test_impossible_configurations_are_refused_with_the_numbers(change, words):
    with pytest.raises(ValueError) as refusal:
        PAN2Transformer3DModel(**SMALL | change)
    for word in words:
        assert word in str(refusal.value)


def test_private_config_keys_are_ignored():
    config = MMDiTConfig.read(SMALL | {"_class_name": "PAN2Transformer3DModel", "_diffusers_version": "0.42.1"})
    assert config == MMDiTConfig.read(SMALL) and config.rope_axes_dim == (4, 6, 6)
    assert {f.name for f in fields(config)} == set(SMALL)


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (([1, 8, 2, 4, 4], [1], [1, 3, 16]), ["hidden_states", "[1, 8, 2, 4, 4]", "9"]),
        (([1, 9, 4, 4], [1], [1, 3, 16]), ["hidden_states", "[1, 9, 4, 4]"]),
        (([1, 9, 2, 5, 4], [1], [1, 3, 16]), ["height 5", "even"]),
        (([1, 9, 2, 4, 7], [1], [1, 3, 16]), ["width 7", "even"]),
        (([1, 9, 0, 4, 4], [1], [1, 3, 16]), ["empty"]),
        (([1, 9, 2, 4, 4], [1], [1, 3, 15]), ["[1, 3, 15]", "text_embed_dim = 16"]),
        (([1, 9, 2, 4, 4], [1], [1, 0, 16]), ["at least one token"]),
        (([2, 9, 2, 4, 4], [2], [1, 3, 16]), ["[1, 3, 16]", "[2, tokens, 16]"]),
        (([2, 9, 2, 4, 4], [1], [2, 3, 16]), ["timestep", "[1]", "2 samples"]),
        (([2, 9, 2, 4, 4], [], [2, 3, 16]), ["timestep", "[]"]),
    ],
)
def test_wrong_shapes_are_refused_in_words(shapes, words):
    model = PAN2Transformer3DModel(**SMALL)
    with pytest.raises(ValueError) as refusal:
        model(*(torch.zeros(shape) for shape in shapes))
    for word in words:
        assert word in str(refusal.value)

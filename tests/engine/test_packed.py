import copy
import itertools

import pytest
import torch
from golden_case import Case
from safetensors.torch import load_file, save_file

from engine import checkpoint
from engine.mmdit import PAN2Transformer3DModel
from engine.packed import joint

TRIPLES = (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"))


def attention(model, block=0):
    return model.transformer_blocks[block].attn


def one_tensor(model) -> bool:
    """Whether each three weights, and biases, begin where the one before ends."""
    for block in model.transformer_blocks:
        for names in TRIPLES:
            for leaf in ("weight", "bias"):
                parts = [getattr(getattr(block.attn, name), leaf) for name in names]
                for a, b in itertools.pairwise(parts):
                    if a.data_ptr() + a.nbytes != b.data_ptr():
                        return False
                    if a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr():
                        return False
    return True


@pytest.fixture
def model():
    return Case("tf_deep").model()


def test_a_model_is_packed_and_stays_so_when_moved_cast_or_loaded(model):
    assert one_tensor(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    for change in (
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: model.cast(torch.bfloat16),
        lambda: model.to(torch.float32),
        lambda: model.load_state_dict(weights),
        lambda: model.share_memory(),
    ):
        change()
        assert one_tensor(model)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_the_joint_weight_is_a_view_with_the_released_order(model):
    for layers, names in zip(attention(model).streams(), TRIPLES, strict=True):
        weight, bias = joint(layers)
        parts = [getattr(attention(model), name) for name in names]
        assert torch.equal(weight, torch.cat([part.weight for part in parts]))
        assert torch.equal(bias, torch.cat([part.bias for part in parts]))
        with torch.no_grad():
            parts[1].weight[0, 0] = 42
        assert weight[len(parts[0].weight), 0] == 42


@pytest.mark.parametrize(
    "change",
    [
        lambda model: copy.deepcopy(model),
        lambda model: (
            model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True) and model
        ),
        lambda model: attention(model).to_k.to(torch.float64).to(torch.float32) and model,
    ],
    ids=["copy", "assign", "one layer moved"],
)
def test_what_was_torn_apart_is_joined_by_a_copy_that_changes_no_parameter(model, change):
    other = change(model)
    assert not one_tensor(other)
    places = [p.data_ptr() for p in other.parameters()]
    layers = attention(other).streams()[0]
    weight, bias = joint(layers)
    assert torch.equal(weight, torch.cat([layer.weight for layer in layers]))
    assert torch.equal(bias, torch.cat([layer.bias for layer in layers]))
    assert places == [p.data_ptr() for p in other.parameters()]


def test_parameters_stay_the_same_objects_for_an_optimizer(model):
    before = dict(model.named_parameters())
    model.to(torch.float64).to(torch.float32)
    optimizer = torch.optim.AdamW(before.values(), lr=0.1)
    attention(model).to_q.weight.square().sum().backward()
    old = attention(model).to_q.weight.detach().clone()
    optimizer.step()
    assert dict(model.named_parameters()) == before and one_tensor(model)
    assert not torch.equal(joint(attention(model).streams()[0])[0][: len(old)], old)


def test_saving_writes_each_name_with_its_own_bytes(model, tmp_path):
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    stored = load_file(tmp_path / "weights.safetensors")
    assert stored.keys() == weights.keys()
    assert (tmp_path / "weights.safetensors").stat().st_size < 1.1 * sum(
        value.nbytes for value in weights.values()
    ) + 2e5
    assert all(torch.equal(value, weights[name]) for name, value in stored.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_loader_writes_through_the_views(toy_checkpoint, dtype):
    model = checkpoint.load_transformer(toy_checkpoint, "cpu", dtype)
    assert one_tensor(model)
    assert attention(model).to_q.weight.untyped_storage().nbytes() == 3 * attention(model).to_q.weight.nbytes


def test_on_meta_nothing_is_packed_and_every_name_is_there():
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**Case("tf_deep").config)
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    assert one_tensor(model)

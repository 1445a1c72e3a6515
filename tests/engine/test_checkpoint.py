"""Loading a checkpoint: what arrives is what the files hold, and what is wrong with them is said by name."""

from __future__ import annotations

import ctypes
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import checkpoint, hub, memory, parts, weights
from engine.errors import Cancelled, CheckpointError, ResourceError
from engine.mmdit import PAN2Transformer3DModel
from engine.prompt import tokenize
from tests.toy import TEXT, TRANSFORMER, transformer_shapes, write_json, write_shards, write_toy_checkpoint

DATA = Path(__file__).resolve().parents[1] / "data"
CPU = torch.device("cpu")
LINUX = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc/self/maps")
M_MMAP_THRESHOLD = -3  # of malloc.h
F32, BF16 = torch.float32, torch.bfloat16
LOADERS = {
    "transformer": checkpoint.load_transformer,
    "vae": checkpoint.load_vae,
    "text_encoder": checkpoint.load_text_encoder,
}


@pytest.fixture
def copy(toy_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint to break."""
    return Path(shutil.copytree(toy_checkpoint, tmp_path / "checkpoint"))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a part as its files have them, in memory of their own."""
    return {k: v.clone() for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


def rewrite(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def shards(copy: Path) -> list[Path]:
    return sorted((copy / "transformer").glob("*.safetensors"))


def mapped_files(folder: Path) -> list[tuple[int, int, str]]:
    """Start, end and file name of the memory mappings of files below a folder."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    return [(*(int(edge, 16) for edge in line[0].split("-")), Path(line[5]).name) for line in lines]


def forbid(monkeypatch, path: Path) -> None:
    """Make a file unreadable; tests may run as root, whom no permission stops."""
    whole = Path.open

    def refuse(self: Path, *args: object, **options: object) -> object:
        if self == path:
            raise PermissionError(13, "Permission denied")
        return whole(self, *args, **options)

    monkeypatch.setattr(Path, "open", refuse)


def refused(copy: Path, part: str = "transformer") -> str:
    with pytest.raises(CheckpointError) as caught:
        LOADERS[part](copy, CPU, F32)
    return str(caught.value)


# What arrives


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_transformer_is_what_its_files_hold_in_the_planned_dtypes(toy_checkpoint, dtype):
    model = checkpoint.load_transformer(toy_checkpoint, "cpu", dtype)
    files, loaded = stored(toy_checkpoint / "transformer"), model.state_dict()
    assert set(loaded) == set(files)
    for name, tensor in loaded.items():
        island = ".norm1.linear." in name
        assert tensor.dtype == (F32 if island else dtype), name
        assert torch.equal(tensor, files[name].to(tensor.dtype)), name
    assert not model.training
    assert not any(p.requires_grad or p.is_meta for p in model.parameters())


@LINUX
def test_modulation_weights_stay_in_the_mapped_file_and_nothing_else_does(toy_checkpoint):
    model = checkpoint.load_transformer(toy_checkpoint, CPU, F32)
    ranges = mapped_files(toy_checkpoint)
    for name, tensor in model.state_dict().items():
        inside = any(start <= tensor.data_ptr() < end for start, end, _ in ranges)
        assert inside == (".norm1.linear." in name), name


def test_loading_twice_gives_equal_models(toy_checkpoint):
    a, b = (checkpoint.load_transformer(toy_checkpoint, CPU, BF16).state_dict() for _ in range(2))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_same_seed_writes_the_same_toy(toy_checkpoint, tmp_path):
    again = write_toy_checkpoint(tmp_path / "again", seed=0)
    other = write_toy_checkpoint(tmp_path / "other", seed=1)
    names = [path.relative_to(again) for path in again.rglob("*") if path.is_file()]
    assert all((again / name).read_bytes() == (toy_checkpoint / name).read_bytes() for name in names)
    changed = [name for name in names if (again / name).read_bytes() != (other / name).read_bytes()]
    assert {name.parts[0] for name in changed} == {"transformer", "vae", "text_encoder"}


def test_the_vae_equals_the_one_that_diffusers_loads(toy_checkpoint):
    from diffusers import AutoencoderKLWan

    ours = checkpoint.load_vae(toy_checkpoint, CPU, F32)
    theirs = AutoencoderKLWan.from_pretrained(toy_checkpoint / "vae")
    assert ours.config.latents_mean == theirs.config.latents_mean
    latents = torch.randn(1, 48, 2, 2, 2, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(ours.decode(latents).sample, theirs.decode(latents).sample)


def test_the_text_encoder_equals_the_one_that_transformers_loads(toy_checkpoint):
    from transformers import Qwen3_5TextModel

    ours = checkpoint.load_text_encoder(toy_checkpoint, CPU, F32)
    theirs = Qwen3_5TextModel.from_pretrained(toy_checkpoint / "text_encoder", dtype=F32).eval()
    tokens = tokenize(ours.tokenizer, "a red circle")
    with torch.no_grad():
        states = theirs(input_ids=torch.tensor([tokens.ids]), output_hidden_states=True).hidden_states
    found = ours.encode("a red circle").embedding
    assert torch.equal(found, states[-3][:, tokens.start :])
    assert not torch.equal(found, ours.encode("a red square").embedding)


def test_computed_buffers_are_those_of_a_normally_built_model(toy_checkpoint):
    from transformers import Qwen3_5TextConfig, Qwen3_5TextModel

    ours = dict(checkpoint.load_text_encoder(toy_checkpoint, CPU, BF16).model.named_buffers())
    normal = dict(Qwen3_5TextModel(Qwen3_5TextConfig.from_dict(TEXT)).named_buffers())
    assert set(ours) == set(normal) and normal
    assert all(torch.equal(ours[name], normal[name]) and ours[name].dtype == F32 for name in normal)


def test_dead_text_layers_are_not_loaded(toy_checkpoint):
    encoder = checkpoint.load_text_encoder(toy_checkpoint, CPU, BF16)
    names = {name.split(".")[1] for name, _ in encoder.model.named_parameters() if name.startswith("layers.")}
    assert names == {"0", "1"}
    assert {p.dtype for p in encoder.model.parameters()} == {BF16}


def test_the_scheduler_is_the_configured_one(toy_checkpoint):
    assert checkpoint.load_scheduler(toy_checkpoint).config.shift == 9.0


def test_release_names_and_shapes_are_the_models():
    release = json.loads((DATA / "release_keys.json").read_text())
    expected = {}
    for entry in release["keys"]:
        names = [entry["key"].format(i=i) for i in range(entry["count"])]
        expected |= dict.fromkeys(names, tuple(entry["shape"]))
    with torch.device("meta"):
        model = PAN2Transformer3DModel(**release["config"])
    assert {name: tuple(value.shape) for name, value in model.state_dict().items()} == expected
    assert transformer_shapes(release["config"]) == expected
    islands = {entry["key"] for entry in release["keys"] if entry["release_dtype"] == "float32"}
    plan = parts.transformer_plan(CPU, BF16)
    assert {e["key"] for e in release["keys"] if weights.placement(plan, e["key"]).dtype == F32} == islands


# How it arrives


@pytest.fixture
def freed_at_once():
    """Large memory goes back to the system when it is freed. Otherwise glibc keeps blocks of a size that was freed
    before, by whatever test ran earlier, and their number is measured too."""
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 2**20)


@LINUX
@pytest.mark.usefixtures("freed_at_once")
def test_the_host_holds_what_has_arrived_and_no_more_than_one_tensor_besides(tmp_path):
    side, count = 1536, 12
    tensors = {f"{i}.weight": torch.full((side, side), float(i)).bfloat16() for i in range(count)}
    tensors |= {f"{i}.weight": tensors[f"{i}.weight"].float() for i in (1, 5, 9)}
    write_shards(tmp_path, "model", tensors, shards=4)
    del tensors
    with torch.device("meta"):
        model = torch.nn.Sequential(*(torch.nn.Linear(side, side, bias=False) for _ in range(count)))
    plan = tuple((f"{i}.*", weights.Placement(F32, CPU, mapped=True)) for i in (1, 5, 9)) + parts.plain_plan(CPU, F32)
    entries, process, one = weights.list_tensors(tmp_path), psutil.Process(), 4 * side**2
    before, grown = process.memory_info().rss, []

    def watch(*_):
        arrived = sum(not p.is_meta and float(p[0, 0]) not in (1, 5, 9) for p in model.parameters())
        grown.append(process.memory_info().rss - before - arrived * one)

    weights.fill(model, entries, plan, "model", watch)
    assert len(grown) == count and max(grown) < 1.5 * one
    assert [float(p[-1, -1]) for p in model.parameters()] == list(range(count))
    assert {name for _, _, name in mapped_files(tmp_path)} == {entries[f"{i}.weight"].file.name for i in (1, 5, 9)}


def test_reading_by_way_of_a_block_gives_the_same_bytes(tmp_path):
    (tmp_path / "x").write_bytes(bytes(range(100)))
    for size in (1, 7, 93, 94, 200):
        target = torch.zeros(93, dtype=torch.uint8)
        with (tmp_path / "x").open("rb", buffering=0) as file:
            file.seek(7)
            weights._read_staged(file, target, size)
        assert target.tolist() == list(range(7, 100))


def test_a_file_that_shrinks_after_its_header_was_read_is_named(copy, monkeypatch):
    real = checkpoint.check_tensors

    def shrink(where, *rest):
        real(where, *rest)
        path = where / "diffusion_pytorch_model.safetensors"
        path.write_bytes(path.read_bytes()[:-5000])

    monkeypatch.setattr(checkpoint, "check_tensors", shrink)
    assert "is damaged: it ends before its last tensor does" in refused(copy, "vae")


@pytest.mark.parametrize("part", LOADERS)
def test_progress_goes_up_to_the_bytes_that_are_read(toy_checkpoint, part):
    calls = []
    LOADERS[part](toy_checkpoint, CPU, F32, lambda *call: calls.append(call))
    assert {call[0] for call in calls} == {part}
    done = [call[1] for call in calls]
    assert done == sorted(done) and done[-1] == calls[-1][2]
    live = {"transformer": 201_776, "vae": 3_193_264, "text_encoder": 32_216}
    assert {call[2] for call in calls} == {live[part]}


def test_progress_may_cancel(toy_checkpoint):
    def cancel(*_):
        raise Cancelled("stop")

    with pytest.raises(Cancelled):
        checkpoint.load_vae(toy_checkpoint, CPU, F32, cancel)


# Layouts


def test_shards_without_index_and_a_single_file_are_read_too(copy):
    (index,) = (copy / "transformer").glob("*.index.json")
    index.unlink()
    a = checkpoint.load_transformer(copy, CPU, F32).state_dict()
    tensors = stored(copy / "transformer")
    for path in shards(copy):
        path.unlink()
    write_shards(copy / "transformer", "diffusion_pytorch_model", tensors, shards=1)
    b = checkpoint.load_transformer(copy, CPU, F32).state_dict()
    assert all(torch.equal(a[name], b[name]) for name in a) and set(a) == set(b)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.", "model.language_model.", "language_model.model."])
def test_a_multimodal_text_encoder_is_the_same(toy_checkpoint, copy, prefix):
    tensors = {prefix + name: value for name, value in stored(copy / "text_encoder").items()}
    others = ("model.visual.blocks.0.attn.qkv.weight", "mtp.layers.0.mlp.up_proj.weight", "lm_head.weight")
    tensors |= {name: torch.ones(2, 2) for name in others}
    (copy / "text_encoder" / "model.safetensors").unlink()
    write_shards(copy / "text_encoder", "model", tensors, shards=2)
    nested = {"model_type": "qwen3_5", "text_config": TEXT, "vision_config": {"depth": 1}}
    write_json(copy / "text_encoder" / "config.json", nested)
    a, b = (checkpoint.load_text_encoder(f, CPU, BF16).model.state_dict() for f in (toy_checkpoint, copy))
    assert set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_a_text_encoder_may_come_without_its_dead_layers(copy):
    path = copy / "text_encoder" / "model.safetensors"
    live = {k: v for k, v in load_file(path).items() if not k.startswith(("layers.2.", "layers.3.", "norm."))}
    save_file(live, path)
    assert checkpoint.load_text_encoder(copy, CPU, F32).model.embed_tokens.weight.any()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update({"embed_tokens.weight": t["model.embed_tokens.weight"].clone()}), "holds 2"),
        (lambda t: t.pop("model.embed_tokens.weight"), "holds 0"),
        (lambda t: t.update({"layers.0.mlp.up_proj.weight": torch.ones(2)}), "layers.0.mlp.up_proj.weight"),
        (lambda t: t.update({"model.strange": torch.ones(2)}), "1 tensors are unknown: strange"),
    ],
)
def test_text_weights_under_unclear_names_are_refused(copy, change, words):
    path = copy / "text_encoder" / "model.safetensors"
    save_file({f"model.{name}": value for name, value in load_file(path).items()}, path)
    rewrite(path, change)
    assert words in refused(copy, "text_encoder")


# Wrong weights


def test_a_dropped_key_is_named(copy):
    rewrite(shards(copy)[0], lambda t: t.pop("x_embedder.bias"))
    assert "promises 1 tensors" in (message := refused(copy)) and "x_embedder.bias" in message
    (copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    assert "1 tensors are missing: x_embedder.bias" in refused(copy)


def test_many_missing_keys_are_counted_and_the_first_ten_listed(copy):
    (copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    lost = sorted(load_file(shards(copy)[1]))
    shards(copy)[1].unlink()
    message = refused(copy)
    assert f"{len(lost)} tensors are missing: {', '.join(lost[:10])} and {len(lost) - 10} more" in message
    assert lost[10] not in message


def test_an_extra_key_is_named(copy):
    rewrite(shards(copy)[2], lambda t: t.update({"transformer_blocks.9.what": torch.ones(2)}))
    assert "1 tensors are unknown: transformer_blocks.9.what" in refused(copy)


def test_a_key_in_two_files_is_refused(copy):
    rewrite(shards(copy)[2], lambda t: t.update({"x_embedder.bias": torch.ones(32)}))
    message = refused(copy)
    assert "1 tensors both in" in message and "x_embedder.bias" in message and shards(copy)[2].name in message


def test_a_dropped_shard_is_named(copy):
    lost = shards(copy)[1]
    lost.unlink()
    assert f"lacks 1 of its 3 weight files: {lost.name}" in refused(copy)


def test_a_transposed_matrix_is_named_with_both_shapes(copy):
    name = "transformer_blocks.0.ff.net.0.proj.weight"
    path = next(path for path in shards(copy) if name in load_file(path))
    rewrite(path, lambda t: t.update({name: t[name].T.contiguous()}))
    assert f"{name} has [32, 64] in {path.name} and must have [64, 32]" in refused(copy)


def test_a_file_that_is_cut_short_is_named_with_the_cure(copy):
    path = shards(copy)[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    message = refused(copy)
    assert f"{path} is damaged: it has {size - 1} bytes and its header describes {size}" in message
    assert "Delete it and download it again" in message
    path.write_bytes(path.read_bytes()[:20])
    assert "20 bytes are not a whole safetensors file" in refused(copy)
    path.write_bytes(b"")
    assert "0 bytes are not a whole safetensors file" in refused(copy)


def test_any_flipped_byte_of_a_header_is_noticed_by_name(copy):
    path = shards(copy)[0]
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    for position in (0, 2, 7, 8, 9, 40, *range(60, end - 20, 301)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x15]) + whole[position + 1 :])
        message = refused(copy)
        assert str(copy / "transformer") in message, position


def test_offsets_that_overlap_are_refused(copy):
    path = copy / "vae" / "diffusion_pytorch_model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + length])
    _, second = sorted((k for k in header if k != "__metadata__"), key=lambda k: header[k]["data_offsets"])[:2]
    size = header[second]["data_offsets"][1] - header[second]["data_offsets"][0]
    header[second]["data_offsets"] = [0, size]
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + whole[8 + length :])
    assert f"{path} is damaged" in refused(copy, "vae")


def write_header(path: Path, header: str) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(8))


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [0.0, 8.0]},
        {"data_offsets": [False, 8]},
        {"data_offsets": [0, "8"]},
        {"data_offsets": [0]},
        {"data_offsets": [-8, 0]},
        {"shape": [2.0]},
        {"shape": [-1, -2]},
        {"shape": 2},
        {"dtype": 5},
        {"dtype": ["F32"]},
    ],
)
def test_an_impossible_entry_of_a_header_is_refused(copy, entry):
    path = shards(copy)[0]
    write_header(path, json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | entry}))
    assert f"{path} is damaged: its header can't be read" in refused(copy)


def test_a_deeply_nested_header_is_refused(copy):
    path = shards(copy)[0]
    write_header(path, "[" * 200_000)
    assert f"{path} is damaged: its header can't be read" in refused(copy)


def test_a_weight_file_that_may_not_be_read_is_named(copy, monkeypatch):
    path = shards(copy)[0]
    forbid(monkeypatch, path)
    assert f"{path} can't be read" in refused(copy)


def test_a_git_lfs_pointer_is_recognised(copy):
    shards(copy)[0].write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    assert "git lfs pull" in refused(copy)


def test_quantized_weights_are_refused(copy):
    rewrite(shards(copy)[2], lambda t: t.update({"proj_out.weight": t["proj_out.weight"].to(torch.int8)}))
    message = refused(copy)
    assert "proj_out.weight (I8)" in message and "Quantized" in message


@pytest.mark.parametrize("name", ["../vae/x.safetensors", "/etc/passwd", 7])
def test_an_index_may_not_reach_out_of_its_folder(copy, name):
    index = copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    edit(index, weight_map={"x_embedder.bias": name})
    assert "file names of the same folder" in refused(copy)


def test_two_index_files_are_refused(copy):
    index = copy / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    shutil.copy(index, index.with_name("model.safetensors.index.json"))
    assert "2 index files" in refused(copy)


def test_pickled_weights_are_refused_with_words(copy):
    (copy / "vae" / "diffusion_pytorch_model.safetensors").rename(copy / "vae" / "diffusion_pytorch_model.bin")
    message = refused(copy, "vae")
    assert "diffusion_pytorch_model.bin" in message and "can run code" in message
    (copy / "vae" / "diffusion_pytorch_model.bin").unlink()
    assert "holds no weights" in refused(copy, "vae")


def test_an_embedding_of_zeros_is_refused(copy):
    path = copy / "text_encoder" / "model.safetensors"
    rewrite(path, lambda t: t["embed_tokens.weight"].zero_())
    assert "holds only zeros" in refused(copy, "text_encoder")
    rewrite(path, lambda t: t["embed_tokens.weight"].fill_(torch.nan))
    assert "not finite" in refused(copy, "text_encoder")


def test_a_tensor_that_never_came_is_named(toy_checkpoint, monkeypatch):
    monkeypatch.setattr(checkpoint, "fill", lambda *_: None)
    message = refused(toy_checkpoint)
    assert "were never loaded" in message and "context_embedder.0.weight" in message


def test_a_file_that_may_not_be_hashed_is_named(copy, monkeypatch):
    hub.write_checksums(copy)
    path = copy / "vae" / "config.json"
    forbid(monkeypatch, path)
    with pytest.raises(CheckpointError, match="can't be read") as caught:
        checkpoint.verify(copy)
    assert str(path) in str(caught.value)


# Wrong configurations


UNREADABLE = [
    ('{"a": ', "can't be read as JSON"),
    ("[]", "must hold a JSON object"),
    ("[" * 200_000, "can't be read as JSON"),
]


@pytest.mark.parametrize("part", LOADERS)
def test_a_missing_configuration_is_named(copy, part):
    (copy / part / "config.json").unlink()
    assert f"{copy / part / 'config.json'} is missing" in refused(copy, part)


@pytest.mark.parametrize("part", LOADERS)
@pytest.mark.parametrize(("text", "words"), UNREADABLE, ids=["cut", "list", "nested"])
def test_an_unreadable_configuration_is_named(copy, part, text, words):
    (copy / part / "config.json").write_text(text)
    message = refused(copy, part)
    assert words in message and str(copy / part / "config.json") in message


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_a_configuration_of_another_class_is_refused(copy, part):
    edit(copy / part / "config.json", _class_name="WanTransformer3DModel")
    message = refused(copy, part)
    assert "'WanTransformer3DModel'" in message and parts.CLASSES[part] in message


def test_another_scheduler_or_text_encoder_is_refused(copy):
    edit(copy / "scheduler" / "scheduler_config.json", _class_name="DDIMScheduler")
    with pytest.raises(CheckpointError, match="'DDIMScheduler' and must be of 'FlowMatchEulerDiscreteScheduler'"):
        checkpoint.load_scheduler(copy)
    edit(copy / "text_encoder" / "config.json", model_type="umt5")
    assert "'umt5' and must be 'qwen3_5_text'" in refused(copy, "text_encoder")


@pytest.mark.parametrize(
    "values",
    [{"shift": "abc"}, {"num_train_timesteps": 10**11}, {"time_shift_type": "x"}, {"use_karras_sigmas": True}],
    ids=str,
)
def test_an_impossible_scheduler_is_refused_by_file_and_setting(copy, values):
    path = copy / "scheduler" / "scheduler_config.json"
    edit(path, **values)
    for use in (checkpoint.load_scheduler, checkpoint.describe):
        with pytest.raises(CheckpointError, match=next(iter(values))) as caught:
            use(copy)
        assert str(path) in str(caught.value)


def test_a_scheduler_that_diffusers_cannot_make_is_refused(copy, monkeypatch):
    edit(copy / "scheduler" / "scheduler_config.json", time_shift_type="x")
    monkeypatch.setattr(parts, "check_config", lambda _: None)
    with pytest.raises(CheckpointError, match="describes an impossible scheduler"):
        checkpoint.load_scheduler(copy)


def test_an_unknown_or_impossible_setting_of_the_transformer_is_named(copy):
    edit(copy / "transformer" / "config.json", depth=3)
    assert "unknown transformer setting depth" in refused(copy)
    write_json(copy / "transformer" / "config.json", TRANSFORMER | {"rope_axes_dim": [4, 6, 8]})
    assert "up to 18" in refused(copy)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("z_dim", 16, "z_dim is 16 and must be 48"),
        ("patch_size", 1, "patch_size is 1 and must be 2"),
        ("scale_factor_spatial", 8, "scale_factor_spatial is 8 and must be 16"),
        ("scale_factor_temporal", 8, "scale_factor_temporal is 8 and must be 4"),
        ("dim_mult", [1, 2, 4], "the factor of its layers in space is 8 and must be 16"),
        ("temperal_downsample", [True, True, True], "the factor of its layers in time is 8 and must be 4"),
        ("out_channels", 3, "out_channels is 3 and must be 12"),
        ("latents_mean", [0.0] * 16, "latents_mean is 16 and must be 48"),
        ("latents_mean", 5, "latents_mean is None and must be 48"),
        ("latents_mean", "a" * 48, "latents_mean is None and must be 48"),
        ("latents_mean", ["a"] * 48, "latents_mean must be finite numbers"),
        ("latents_mean", [math.nan] * 48, "latents_mean must be finite numbers"),
        ("latents_mean", [10**400] * 48, "latents_mean must be finite numbers"),
        ("latents_std", [0.0] * 48, "latents_std must be positive"),
        ("latents_std", [1.0] * 47 + [-1.0], "latents_std must be positive"),
        ("latents_std", [math.inf] * 48, "latents_std must be positive, finite"),
        ("latents_std", [1e300] * 48, "latents_std must be positive, finite"),
        ("latents_std", [True] * 48, "latents_std must be positive, finite"),
    ],
)
def test_a_vae_with_other_factors_is_refused_with_the_numbers(copy, name, value, words):
    edit(copy / "vae" / "config.json", **{name: value})
    assert words in refused(copy, "vae")


def test_a_configuration_that_cannot_be_built_is_named(copy):
    edit(copy / "vae" / "config.json", base_dim="eight")
    assert f"{copy / 'vae' / 'config.json'} describes an impossible model" in refused(copy, "vae")
    edit(copy / "text_encoder" / "config.json", hidden_size="x")
    assert "lacks hidden_size" in refused(copy, "text_encoder")


def test_parts_that_do_not_belong_together_are_refused(copy):
    edit(copy / "transformer" / "config.json", in_channels=33, out_channels=16)
    message = refused(copy)
    assert "out_channels is 16 and must be 48, the VAE's z_dim 48" in message and "in_channels is 33" in message
    write_json(copy / "transformer" / "config.json", TRANSFORMER | {"text_embed_dim": 32})
    words = "text_embed_dim is 32 and must be 24, the text encoder's hidden_size 24"
    assert words in refused(copy)
    with pytest.raises(CheckpointError, match=words):
        checkpoint.describe(copy)


def test_a_tokenizer_that_is_missing_damaged_or_another_is_refused(copy):
    folder = copy / "tokenizer"
    (folder / "chat_template.jinja").unlink()
    assert "has no chat template" in refused(copy, "text_encoder")
    (folder / "tokenizer.json").write_text("{}")
    assert "can't be read as a tokenizer" in refused(copy, "text_encoder")
    shutil.rmtree(folder)
    assert f"{folder} is missing" in refused(copy, "text_encoder")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}", "fails on a prompt"),
        ("{{ raise_exception('no') }}", "fails on a prompt"),
        ("<|im_start|>user\na red ball<|im_end|>\n", "leaves the prompt out"),
    ],
)
def test_a_chat_template_that_does_not_work_is_refused_with_its_folder(copy, template, words):
    (copy / "tokenizer" / "chat_template.jinja").write_text(template)
    message = refused(copy, "text_encoder")
    assert words in message and str(copy / "tokenizer") in message


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(copy):
    edit(copy / "text_encoder" / "config.json", vocab_size=260)
    assert "has 261 tokens and the text encoder's vocabulary 260" in refused(copy, "text_encoder")


# Size


def test_describe_counts_what_is_there(toy_checkpoint):
    info = checkpoint.describe(toy_checkpoint)
    tensors = stored(toy_checkpoint / "transformer")
    islands = sum(t.nbytes for name, t in tensors.items() if ".norm1.linear." in name)
    part = info.transformer
    assert part.parameters == sum(t.numel() for t in tensors.values()) == part.resident + islands // 4
    assert part.bytes == sum(t.nbytes for t in tensors.values())
    assert part.mapped == islands and part.files == 3 and part.dtypes["F32"] == islands // 4
    assert part.device_bytes(BF16) == 2 * part.resident
    assert info.vae.dtypes == {"F32": info.vae.parameters} and info.vae.config["z_dim"] == 48
    assert info.text_encoder.resident < info.text_encoder.parameters
    assert info.parameters == sum(p.parameters for p in info.parts) and info.bytes > 3_000_000


def test_describe_fits_what_is_loaded(toy_checkpoint):
    info = checkpoint.describe(toy_checkpoint)
    for part in info.parts:
        model = LOADERS[part.name](toy_checkpoint, CPU, F32)
        model = model.model if part.name == "text_encoder" else model
        resident = sum(p.numel() for n, p in model.named_parameters() if ".norm1.linear." not in n)
        assert resident == part.resident


def test_describe_names_what_is_missing(copy):
    shards(copy)[0].unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of its 3 weight files"):
        checkpoint.describe(copy)
    shutil.rmtree(copy / "vae")
    with pytest.raises(CheckpointError, match="Download vae/ again"):
        checkpoint.describe(copy)


def test_too_little_memory_is_said_before_anything_is_read(toy_checkpoint, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 100_000)
    monkeypatch.setattr(checkpoint, "fill", lambda *_: pytest.fail("read"))
    with pytest.raises(ResourceError, match=r"needs 148 KiB on cpu and 98 KiB are free. Close other programs"):
        checkpoint.load_transformer(toy_checkpoint, CPU, BF16)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_running_out_of_memory_on_the_way_is_said_with_numbers(toy_checkpoint, monkeypatch, error):
    def fail(*_):
        raise error

    monkeypatch.setattr(weights, "place", fail)
    with pytest.raises(ResourceError, match=r"does not fit on cpu: it needs 295 KiB and .* are free"):
        checkpoint.load_transformer(toy_checkpoint, CPU, F32)


def test_other_runtime_errors_stay_what_they_are(toy_checkpoint, monkeypatch):
    monkeypatch.setattr(weights, "place", lambda *_: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="inconsistent tensor size"):
        checkpoint.load_transformer(toy_checkpoint, CPU, F32)


def test_free_memory_keeps_to_the_containers_limit(tmp_path):
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 300\ninactive_file 250\n")
    assert memory.container_memory(tmp_path) == 550
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.container_memory(tmp_path) is None
    assert memory.container_memory(tmp_path / "absent") is None
    assert memory.free_memory(CPU) > 0 and memory.free_memory(torch.device("meta")) is None


@pytest.mark.parametrize(
    ("amount", "words"), [(12, "12 bytes"), (2048, "2 KiB"), (5 << 19, "2.5 MiB"), (3 << 30, "3.0 GiB")]
)
def test_bytes_in_words(amount, words):
    assert memory.in_words(amount) == words

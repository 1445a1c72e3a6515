"""The rehearsal on a CPU: the same code as at full size, and that its random model is alive at any depth."""

import json

import pytest
import torch

from engine import rehearsal, rehearse
from engine.errors import EngineError, RequestError, ResourceError
from engine.fp8 import Fp8Linear
from engine.rehearsal import FULL, SMALL, random_transformer
from engine.settings import DenoiseSettings

CPU = torch.device("cpu")


def run(capsys, *arguments):
    code = rehearse.main(["--small", "--steps", "2", "--shards", "1", *arguments])
    return code, capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("more", [[], ["--precision", "fp8", "--offload", "blocks", "--quality", "draft"]], ids=str)
def test_everything_runs_and_the_last_line_is_json(capsys, more):
    code, lines = run(capsys, *more)
    assert code == 0
    found = json.loads(lines[-1])
    assert (found["bench"], found["frames"], found["height"], found["width"]) == ("rehearsal", 9, 64, 96)
    assert len(found["steps"]) == 2 and found["seconds_50_steps"] == 50 * found["seconds_per_step"]
    assert {"build", "modulations", "denoise", "decode", "load shards"} <= set(found["stages"])
    assert all(stage["peak_bytes"]["host"] > 0 for stage in found["stages"].values())
    assert found["file"].endswith("KiB") and found["load_bytes_per_second"] > 0
    assert 0.3 < found["velocity_rms"] < 3 and found["branches_apart"] > 0.01


def test_the_residual_stream_stays_sane_over_the_released_depth():
    model = random_transformer(SMALL.config, CPU, torch.float32)
    assert len(model.transformer_blocks) == 44
    seen = []
    for block in model.transformer_blocks:
        block.register_forward_hook(lambda module, given, out: seen.append((given[0], out[0])))
    c = SMALL.config
    draw = torch.Generator().manual_seed(1)
    hidden = torch.randn(1, c.in_channels, 3, 4, 6, generator=draw)
    text = torch.randn(1, 7, c.text_embed_dim, generator=draw)
    model(hidden, torch.tensor([500.0]), text)
    changes = [float((out - given).norm() / given.norm()) for given, out in seen]
    assert min(changes) > 0.01, "no block is the identity"
    assert all(0.1 < float(out.std()) < 30 for _, out in seen)


def test_weights_are_those_of_the_release_and_one_modulation_serves_all():
    model = random_transformer(SMALL.config, CPU, torch.bfloat16)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == (torch.float32 if ".norm1.linear." in name else torch.bfloat16), name
        assert parameter.isfinite().all() and parameter.float().std() > 0, name
    assert len({block.norm1.linear.weight.data_ptr() for block in model.transformer_blocks}) == 1
    first, second = (block.attn.to_q.weight for block in model.transformer_blocks[:2])
    assert not torch.equal(first, second)


def test_fp8_takes_the_inner_blocks():
    model = rehearsal.fp8.convert(random_transformer(SMALL.config, CPU, torch.bfloat16))
    inside = [any(isinstance(layer, Fp8Linear) for layer in block.modules()) for block in model.transformer_blocks]
    assert inside == [False, *[True] * 42, False]


def test_the_full_scene_is_the_published_one():
    assert FULL.latents == (48, 31, 44, 78) and FULL.config.num_layers == 44
    assert rehearsal.video_tokens(FULL.frames, FULL.height, FULL.width) == 26_598


def test_a_dead_model_is_found_out(monkeypatch, tmp_path):
    def dead(config, device, dtype):
        model = random_transformer(config, device, dtype)
        model.proj_out.weight.zero_()
        return model

    monkeypatch.setattr(rehearsal, "random_transformer", dead)
    with pytest.raises(EngineError, match=r"The rehearsal failed: it gave velocities with a deviation of"):
        rehearsal.rehearse(SMALL, "cpu", rehearsal.DenoiseSettings(), folder=tmp_path)


def test_the_peak_of_denoising_is_said_with_and_without_the_parts_that_stay(capsys, tmp_path):
    run = rehearsal.Rehearsal(FULL, CPU, rehearsal.DenoiseSettings(), tmp_path)
    run.found["stages"]["denoise"] = {"peak_bytes": {"cpu": 50 * 2**30}}
    run._say_memory()
    assert "50.0 GiB at most, 46.1 GiB of them weights; 66.6 GiB where text encoder" in capsys.readouterr().out
    assert run.found["denoise_bytes"]["transformer_alone"] == 50 * 2**30


def test_decoding_can_be_left_out(capsys):
    code, lines = run(capsys, "--decoder", "none")
    found = json.loads(lines[-1])
    assert code == 0 and "denoise" in found["stages"] and "decode" not in found["stages"]


def test_bad_sizes_and_missing_packages_are_said(monkeypatch, capsys):
    with pytest.raises(RequestError, match="frames must be 4n"):
        FULL.changed(frames=120)
    with pytest.raises(RequestError, match="shards = 45 must lie between 0 and 44"):
        FULL.changed(shards=45)
    monkeypatch.setitem(rehearse.NEEDED, "no_such_module", "no-such-package")
    assert rehearse.main(["--small"]) == 1
    assert "needs no-such-package" in capsys.readouterr().err


def test_a_model_that_does_not_fit_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(rehearsal, "free_memory", lambda device: 2**30)
    with pytest.raises(ResourceError, match=r"takes 46\.1 GiB on cpu, and 1\.0 GiB are free there.*--small"):
        rehearsal.rehearse(rehearsal.FULL, "cpu", DenoiseSettings())


@pytest.mark.parametrize("size", [{"height": 0}, {"width": -32}, {"height": 33}])
def test_sizes_that_no_model_takes_are_refused(size):
    with pytest.raises(RequestError, match="multiples of 32 from 32 on"):
        rehearsal.FULL.changed(**size)


@pytest.mark.parametrize("given, device", [([], "auto"), (["--device", "1"], "1")])
@pytest.mark.parametrize("small", [False, True])
def test_a_toy_runs_on_the_device_that_is_asked_for_else_on_the_cpu(monkeypatch, given, device, small):
    asked = []
    monkeypatch.setattr("engine.rehearsal.rehearse", lambda scene, device, *_: asked.append(device))
    assert rehearse.main([*given, *["--small"] * small]) == 0
    assert asked == ["cpu" if small and not given else device]


@pytest.mark.parametrize("device, words", [("99", "GPU"), ("", "devices = '' is not known")])
def test_a_device_that_is_absent_is_refused_for_a_toy_as_well(capsys, device, words):
    assert rehearse.main(["--small", "--device", device]) == 2
    assert words in capsys.readouterr().err


def test_a_decoder_that_is_absent_is_refused_before_any_work(capsys, monkeypatch):
    monkeypatch.setattr(rehearsal, "Rehearsal", lambda *_: pytest.fail("worked"))
    assert rehearse.main(["--small", "--decoder", "built"]) == 2
    assert "decode path = 'built' can't run here" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_made_and_one_that_is_a_file_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("engine.rehearsal.rehearse", lambda *_: None)
    assert rehearse.main(["--small", "--folder", str(tmp_path / "a" / "b")]) == 0 and (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("mine")
    assert rehearse.main(["--small", "--folder", str(tmp_path / "file")]) == 2
    assert "--folder" in (said := capsys.readouterr().err) and "can't be written" in said

"""The decoder's bench at a tiny size on a CPU: rows, JSON, stages, layers, and what it counts."""

from __future__ import annotations

import json

import pytest
import torch

from engine import decode_paths
from engine.decode import DecodeRun
from kernels.vae_decode import bench, bench_setup, table
from tests.engine.wan_vae import normal_latents, small_vae


@pytest.fixture
def here(monkeypatch):
    """A machine that has the portable path, with plain PyTorch in the place of the passes."""
    monkeypatch.setattr(decode_paths, "_portable_lack", lambda device: None)


def test_a_run_ends_in_the_agreed_json(here, tmp_path, capsys):
    only = "diffusers-fp32,diffusers-bf16-cl,ours-plain-bf16,ours-portable-fp16"
    assert bench.main(["--small", "--only", only, "--stages", "--profile", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    (line,) = [json.loads(line) for line in printed.splitlines() if line.startswith('{"bench"')]
    facts = {"bench", "gpu", "torch", "date", "commit", "frames", "height", "width", "matmul_tflops", "direct_limit_s"}
    assert facts <= set(line) and line["bench"] == "vae_decode" and line["frames"] == 9
    rows = {row["name"]: row for row in line["rows"]}
    assert list(rows) == only.split(",")
    assert all(set(row) == {"name", "seconds", "peak_gib", "psnr", "ssim", "frames17_s"} for row in rows.values())
    assert float(rows["diffusers-fp32"]["psnr"]) > 120 and rows["diffusers-fp32"]["ssim"] > 0.99999
    assert 45 < rows["ours-plain-bf16"]["psnr"] < rows["ours-portable-fp16"]["psnr"] < 90
    assert all(part in printed for part in ("first convolution and middle", "level 3", "head", "Self CPU"))
    assert json.loads((tmp_path / "vae_decode.jsonl").read_text()) == line


def test_layers_are_timed_and_become_rows_of_the_table(tmp_path, capsys, monkeypatch):
    (tmp_path / "table.json").write_text('{"another GPU": {}, "cpu": {"built": {"fp16": {"a": "direct"}}}}')
    assert bench.main(["--small", "--layers", "--out", str(tmp_path)]) == 0
    assert "time_width cudnn" in capsys.readouterr().out
    written = json.loads((tmp_path / "table.json").read_text())
    assert written.keys() == {"another GPU", "cpu"} and written["cpu"]["built"] == {"fp16": {"a": "direct"}}
    assert written["cpu"]["portable"]["fp16"].keys() == {"16>16@1", "16>8@2"}
    assert table.ways("cpu", "fp16", measured=written)(16, 16, 1) == written["cpu"]["portable"]["fp16"]["16>16@1"]
    assert table.ways("cpu", "bf16", measured=written)(16, 8, 2) == "direct"


def test_what_is_not_here_is_said_in_words(capsys):
    assert bench.main(["--small", "--only", "ours-portable-fp16"]) == 0
    assert "not here: decode path = 'portable' can't run here" in capsys.readouterr().out
    assert bench.main(["--small", "--only", "ours-fast"]) == 2
    assert "there is no ours-fast; there are diffusers-fp32" in capsys.readouterr().err


def test_without_diffusers_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    assert bench.main(["--small"]) == 2
    assert "pip install diffusers" in capsys.readouterr().err


def test_a_decoder_that_falls_back_has_no_row(here):
    vae = small_vae()
    vae.decoder.mid_block.resnets[0].conv2.weight.mul_(1e5)
    run = bench.deliver(vae, normal_latents(2), bench.DecodeSettings("portable", "fp16"))
    with pytest.raises(bench.EngineError, match="it fell back: fp16 overflowed"):
        run()


def test_the_work_of_direct_convolution_is_that_of_the_cost_table():
    """32.3 TMAC a latent frame at 704 x 1248 where the 2x2 form of upsampling is counted, 1.95 PFLOP for 121 frames."""
    assert bench_setup.direct_flops(121, 704, 1248) == pytest.approx(1.95e15, rel=0.15)
    once, twice = (bench_setup.direct_flops(frames, 704, 1248) for frames in (121, 241))
    assert 1.9 < twice / once < 2.0


def test_the_recipe_is_as_published():
    vae, latents = bench_setup.load_vae(None, True, 9, 32, 48)
    again, _ = bench_setup.load_vae(None, True, 9, 32, 48)
    assert latents.shape == (1, 48, 3, 2, 3) and abs(latents.std() - 1) < 0.1
    assert all(torch.equal(a, b) for a, b in zip(vae.parameters(), again.parameters(), strict=True))
    gains = torch.cat([p.flatten() for name, p in vae.named_parameters() if name.endswith("gamma")])
    assert abs(gains.mean() - 1) < 0.05 and 0.15 < gains.std() < 0.25
    plan = bench.bench_stages.Plan(latents, bench.explain(bench.DecodeSettings(), "cpu"))
    assert sum(1 for _ in DecodeRun(vae, plan).pieces(plan.passes[0])) >= 1


def test_a_video_shorter_than_the_truth_is_compared_as_far_as_it_goes():
    truth = torch.rand(5, 3, 16, 16)
    assert bench.quality(truth[:1] + 1e-3, truth)[0] == pytest.approx(66.0, abs=0.1)


def test_a_file_in_the_place_of_the_folder_is_refused_before_the_work(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert bench.main(["--small", "--out", str(tmp_path / "file")]) == 2
    assert "--out" in capsys.readouterr().err

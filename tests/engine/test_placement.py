"""The memory plan, on machines that are not here and the real configuration, which has no weights here either."""

import json
import re

import pytest
import torch

from engine import survey as surveys
from engine.__main__ import main
from engine.decode_plan import Choice
from engine.errors import CheckpointError, RequestError, ResourceError
from engine.parts import describe, released
from engine.placement import Machine, place, weigh
from engine.preset import load_preset
from engine.settings import DenoiseSettings
from engine.survey import survey

GIB = 2**30
BUILT = Choice("built", "fp16", "compiled for this GPU")
CARDS = tuple(torch.device("cuda", index) for index in range(4))


@pytest.fixture(scope="module")
def pan2():
    return released()


def request(frames=121, height=704, width=1248, **settings):
    size = {"frames": frames, "height": height, "width": width}
    return load_preset("pan2").request(prompt="x", denoise=DenoiseSettings(**settings), **size)


def gpu(gib, host=256.0, fp8=True):
    """A card as its vendor counts, less what the driver takes."""
    return Machine("cuda", int(gib * 0.975 * GIB), int(host * GIB), None if fp8 else "no fp8 products")


def test_the_release_weighs_what_is_published(pan2):
    w = weigh(pan2, "bf16", "cuda")
    assert (w.blocks + w.rest) / GIB == pytest.approx(46.1, abs=0.1)
    assert w.mapped / GIB == pytest.approx(16.5, abs=0.1)
    assert w.block / GIB == pytest.approx(1.0, abs=0.01)
    assert (w.text / GIB, w.vae / GIB) == pytest.approx((14.0, 2.63), abs=0.05)
    small = weigh(pan2, "fp8", "cuda")
    assert (small.blocks + small.rest) / GIB == pytest.approx(25.2, abs=0.3)
    assert small.block == w.block, "the first block stays in bf16"


@pytest.mark.parametrize(
    ("gib", "host", "fp8", "precision", "stream", "text"),
    [
        (141, 256, True, "bf16", False, "resident"),
        (80, 256, True, "bf16", False, "resident"),
        (66, 256, False, "bf16", False, "visiting"),
        (48, 128, True, "bf16", True, "resident"),
        (48, 40, True, "fp8", False, "visiting"),
        (24, 128, True, "bf16", True, "visiting"),
        (24, 56, True, "fp8", True, "visiting"),
        (16, 128, True, "bf16", True, "host"),
        (16, 56, True, "fp8", True, "host"),
    ],
)
def test_where_things_go_on_cards_of_different_sizes(pan2, gib, host, fp8, precision, stream, text):
    small = {"height": 480, "width": 832} if gib == 16 else {}
    found = place(pan2, request(**small), gpu(gib, host, fp8))
    assert (found.precision, found.stream, found.text) == (precision, stream, text)
    assert max(found.stages.values()) <= found.machine.free and found.host <= found.machine.host


def test_the_numbers_are_shown(pan2):
    lines = place(pan2, request(), gpu(24, 128)).lines()
    assert "with everything on the device" in lines["Denoising"] and lines["Denoising"].startswith("bf16: as released")
    assert "44.0 GiB of blocks in host memory, 2 at a time on the device (2.0 GiB)" in lines["Weights"]
    assert "16.5 GiB in their file" in lines["Weights"]
    assert "text encoder 14.0 GiB, on the device while it reads a prompt" in lines["Weights"]
    assert "GiB for denoising" in lines["Memory planned"] and "of 23.4 GiB that were free" in lines["Memory planned"]
    assert "of the host, which has 128.0 GiB free" in lines["Memory planned"]
    assert "everything fits on the device at once" in place(pan2, request(), gpu(141)).lines()["Denoising"]


def test_a_machine_on_which_nothing_fits_hears_the_shortfall(pan2):
    with pytest.raises(ResourceError) as refused:
        place(pan2, request(), gpu(8))
    text = str(refused.value)
    assert "121 frames of 1248 x 704 do not fit on this machine" in text
    assert "7.8 GiB are free" in text and "are missing" in text and "for decoding" in text
    assert "a smaller size or fewer frames" in text
    with pytest.raises(ResourceError, match=r"of host memory are needed, 36.0 GiB are free"):
        place(pan2, request(), gpu(24, 36))


def test_longer_videos_need_more(pan2):
    short, long = (place(pan2, request(frames), gpu(141)) for frames in (121, 481))
    assert long.stages["denoising"] - short.stages["denoising"] > 10 * GIB
    assert place(pan2, request(quality="draft"), gpu(141)).stages["denoising"] > short.stages["denoising"]


def test_what_is_asked_for_is_kept_to(pan2):
    assert place(pan2, request(offload="blocks"), gpu(141)).stream
    assert place(pan2, request(precision="fp8"), gpu(141)).precision == "fp8"
    with pytest.raises(ResourceError, match="are missing"):
        place(pan2, request(offload="none", precision="bf16"), gpu(48))
    with pytest.raises(RequestError, match=r"precision = 'fp8': no fp8 products. Choose auto, bf16 or fp32"):
        place(pan2, request(precision="fp8"), gpu(141, fp8=False))


def test_the_small_model_is_resident_on_a_cpu():
    preset = load_preset("tiny")
    info = describe(preset.checkpoint)
    found = place(info, preset.request(prompt="x"), Machine("cpu", 4 * GIB, 4 * GIB, "no GPU"))
    assert (found.precision, found.stream, found.text) == ("fp32", False, "resident")
    assert info.transformer.resident * 4 == found.weights.rest + sum_of_blocks(info)
    with pytest.raises(ResourceError, match=r"49 frames of 448 x 256 .* cpu memory .* Close other programs"):
        place(info, preset.request(prompt="x"), Machine("cpu", 100 * 2**20, 100 * 2**20, "no GPU"))


def sum_of_blocks(info):
    """Of all streamed tensors, without the padding between them."""
    config = info.transformer.config
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    inner, context = (int(dim * config[name]) for name in ("mlp_ratio", "context_mlp_ratio"))
    linear = 8 * (dim * dim + dim) + sum(2 * dim * width + width + dim for width in (inner, context))
    return 4 * config["num_layers"] * (linear + 4 * config["attention_head_dim"])


def test_a_survey_loads_nothing_and_says_where_its_numbers_come_from(monkeypatch):
    monkeypatch.setattr(surveys, "local", lambda checkpoint: None)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: gpu(141)))
    lines = survey("IFM/PAN2", request(), CARDS[:1], BUILT)
    assert lines["Request"] == "121 frames of 1248 x 704"
    assert "published" in lines["Note"] and lines["Denoising"].startswith("bf16: as released")
    assert lines["Decoding"] == "built, fp16: compiled for this GPU"
    with pytest.raises(CheckpointError, match="someone/else is not on this machine yet"):
        survey("someone/else", request(), CARDS[:1], BUILT)


def test_the_command_line_prints_the_plan(capsys):
    assert main(["--plan", "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert lines["Denoising"].startswith("fp32") and "were free" in lines["Memory planned"] and "Note" not in lines
    assert main(["--plan", "--precision", "fp8"]) == 2
    assert "need an NVIDIA GPU" in capsys.readouterr().err
    for refused, words in (
        (["--decode-path", "built"], "'built' can't run here"),
        (["--memory-gib", "4"], "this one would be plain"),
        (["--image", "nowhere.png"], "nowhere.png"),
        (["--devices", "cpu:2", "--decode-path", "portable"], "portable"),
    ):
        assert main(["--plan", *refused]) == 2
        assert words in capsys.readouterr().err


def test_the_command_line_plans_the_group_that_it_is_given(capsys):
    assert main(["--plan", "--json", "--devices", "cpu:2"]) == 0
    lines = json.loads(capsys.readouterr().out)
    assert "spread over 2 processes" in lines["Denoising"] and "rows spread over 2 devices" in lines["Decoding"]
    assert "the text encoder in the first alone" in lines["Weights"] and "were free" in lines["Memory planned, cpu"]


def test_a_group_holds_the_weights_in_every_process_and_shares_the_rest(monkeypatch):
    monkeypatch.setattr(surveys, "local", lambda checkpoint: None)
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls, device: gpu(141)))
    free = {}
    monkeypatch.setattr(surveys, "free_memory", lambda device: free.get(device, gpu(141).free))

    def denoising(cards, key, **settings):
        lines = survey("IFM/PAN2", request(**settings), cards, BUILT._replace(devices=len(cards)))
        return float(re.search(r"([\d.]+) GiB for denoising", lines[key])[1])

    alone = denoising(CARDS[:1], "Memory planned")
    two, first, last = (
        denoising(CARDS[:2], "Memory planned, cuda:0"),
        denoising(CARDS, "Memory planned, cuda:0"),
        denoising(CARDS, "Memory planned, cuda:3"),
    )
    assert two == alone, "one branch each takes what both in turn do"
    assert first < alone and first - last == pytest.approx(15_020_000_000 / GIB, abs=0.2), "the text encoder"
    assert denoising(CARDS[:1] * 2, "Memory planned, cuda:0") == pytest.approx(2 * alone - 14, abs=0.2)
    assert denoising(CARDS, "Memory planned, cuda:0", devices="one") == alone
    free[CARDS[2]] = 40 * GIB
    with pytest.raises(ResourceError, match=r"cuda:2: 121 frames of 1248 x 704 do not fit .* 40.0 GiB are free"):
        survey("IFM/PAN2", request(), CARDS, BUILT)

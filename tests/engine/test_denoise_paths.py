"""Which paths a request's denoising takes: refused before the work, switched without loading again, told to people."""

import dataclasses

import pytest

from engine import checkpoint, executor
from engine.__main__ import denoise_settings, parser
from engine.engine import Engine
from engine.errors import RequestError
from engine.events import VideoFinished
from engine.settings import DenoiseSettings


@pytest.fixture
def engine(toy_preset):
    made = Engine(toy_preset, "cpu")
    yield made
    made.close()


@pytest.mark.parametrize(
    "settings, words",
    [
        ({"fused_kernels": "on"}, r"fused_kernels = 'on' can't run here: Triton kernels need an NVIDIA GPU"),
        ({"attention": "cudnn"}, r"attention = 'cudnn' can't run here: it needs an NVIDIA GPU"),
    ],
)
def test_what_this_machine_lacks_is_refused_before_any_work(engine, tmp_path, settings, words):
    request = engine.preset.request(denoise=DenoiseSettings(**settings))
    with pytest.raises(RequestError, match=words):
        next(engine.generate(request, tmp_path / "job"))
    assert not (tmp_path / "job").exists() and engine.executor.folder is None


@pytest.mark.parametrize(
    "values, words",
    [({"attention": "fast"}, "denoise attention = 'fast'.*cudnn, flash"), ({"fused_kernels": True}, "auto, on, off")],
)
def test_unknown_values_are_refused_with_the_known_ones(values, words):
    with pytest.raises(RequestError, match=words):
        DenoiseSettings.from_dict(values)


def test_paths_and_reasons_are_told_before_and_after_loading(engine, tmp_path):
    for _ in range(2):
        assert engine.about()["Denoising"].startswith("fp32")
        attention, fused, decode = engine.paths()
        assert attention.path == "flash" and attention.reason.startswith("PyTorch's flash attention")
        assert fused.path == "off"
        assert fused.reason.startswith("PyTorch operations; not on: Triton kernels need an NVIDIA GPU")
        assert decode.path == "plain, fp32" and "16 bits gain nothing" in decode.reason
        *_, finished = engine.generate(engine.preset.request(), tmp_path)
    assert isinstance(finished, VideoFinished)
    paths = finished.stats["paths"]
    assert {name: path["path"] for name, path in paths.items()} == {"attention": "flash", "fused_kernels": "off"}
    assert all(path["reason"] for path in paths.values())


def test_nobody_else_tries_anything_out_while_the_model_is_loaded(engine, monkeypatch):
    """Trials switch backends of the whole process, and the page asks for paths from threads of its own."""
    tried, asked = [], []

    def spy(settings, device, model):
        tried.append(model)
        if model is not None and not asked:
            asked.append(engine.paths())
        return denoise_paths(settings, device, model)

    denoise_paths = executor.denoise_paths
    monkeypatch.setattr(executor, "denoise_paths", spy)
    engine.load()
    assert asked and [model for model in tried if model is not None] == [engine.executor.transformer]
    engine.paths()
    assert tried[-1] is engine.executor.transformer


def test_the_page_is_told_what_a_video_takes_while_weights_are_loaded_in_another_form(engine, monkeypatch):
    engine.load()
    request, told = engine.preset.request(), []

    def load(*given):
        told.append(engine.estimate(request))
        assert engine.executor.transformer is None
        return load_transformer(*given)

    load_transformer, before = checkpoint.load_transformer, engine.estimate(request)
    monkeypatch.setattr(checkpoint, "load_transformer", load)
    engine.load(DenoiseSettings(precision="bf16"))
    assert told == [before] and engine.estimate(request).total == before.total


def test_another_attention_is_switched_to_without_loading_again(engine, tmp_path):
    list(engine.generate(engine.preset.request(), tmp_path / "a"))
    model = engine.executor.transformer
    settings = DenoiseSettings(attention="math")
    assert engine.executor.holds(DenoiseSettings()) and not engine.executor.holds(settings)
    *_, finished = engine.generate(engine.preset.request(denoise=settings), tmp_path / "b")
    assert finished.stats["paths"]["attention"]["path"] == "math"
    assert engine.executor.transformer is model
    assert {block.attn.backend for block in model.transformer_blocks} == {"math"}


def test_the_command_line_changes_only_what_it_names(toy_preset):
    base = DenoiseSettings(precision="fp32", attention="math", quality="draft", preview="off")
    preset = dataclasses.replace(toy_preset, denoise=base)
    assert denoise_settings(parser().parse_args(["x"]), preset) == base
    given = parser().parse_args(["x", "--fused-kernels", "off", "--attention", "flash"])
    assert denoise_settings(given, preset) == dataclasses.replace(base, fused_kernels="off", attention="flash")

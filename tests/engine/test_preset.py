"""Presets and requests: what is refused, and whether the message tells what would be taken."""

import json
import math
from pathlib import Path

import pytest

from engine.errors import RequestError
from engine.preset import load_preset, parse_preset, preset_from_environment, preset_names
from engine.request import Request
from engine.settings import DecodeSettings, DenoiseSettings
from engine.shapes import frames_of_seconds, latent_frames, latent_shape, nearest_frames, video_frames, video_tokens
from engine.web.form import quality_menu


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_makes_a_legal_request_of_its_defaults_and_examples(name):
    preset = load_preset(name)
    assert preset.examples
    for prompt in preset.examples:
        assert preset.request(prompt=prompt).prompt == prompt
    assert {(size.height > size.width) - (size.height < size.width) for size in preset.sizes} == {-1, 0, 1}


def test_pan2_defaults_are_the_released_ones():
    request = load_preset("pan2").request(prompt="x")
    assert (request.height, request.width, request.frames) == (704, 1248, 121)
    assert (request.steps, request.shift, request.guidance, request.seed) == (50, 9.0, 2.5, 123)
    assert load_preset("pan2").request(frames=481).frames == 481


BAD = [
    ({"height": 100}, "height = 100", "nearest is 96"),
    ({"width": 1000}, "width = 1000", "nearest is 992"),
    ({"width": 0}, "width = 0", "nearest is 64"),
    ({"height": 256.0}, "height = 256.0", "whole number"),
    ({"frames": 50}, "frames = 50", "nearest is 49"),
    ({"frames": 0}, "frames = 0", "nearest is 1"),
    ({"frames": 485}, "frames = 485", "nearest is 481"),
    ({"steps": 0}, "steps = 0", "nearest is 1"),
    ({"steps": True}, "steps = True", "whole number"),
    ({"steps": 10**6}, "steps = 1000000", "nearest is 100"),
    ({"guidance": math.nan}, "guidance = nan", "number"),
    ({"guidance": math.inf}, "guidance = inf", "number"),
    ({"shift": 0.0}, "shift = 0", "nearest is 0.01"),
    ({"seed": -2}, "seed = -2", "nearest is 0"),
    ({"seed": 2**63}, "seed", "nearest is"),
    ({"prompt": "x" * 20_001}, "20001 characters", "Shorten"),
    ({"prompt": 7}, "prompt", "text"),
    ({"height": 1248, "width": 1248}, "1248 x 1248", "smaller size"),
    ({"height": 928, "width": 1024, "frames": 481}, "481 frames", "at most 441"),
    ({"image": Path("/nowhere/a.png")}, "/nowhere/a.png", "PNG"),
    ({"colour": "red"}, "colour", "prompt"),
    ({"prompt": "a\ud800"}, "prompt is not valid text: its character 2 is U+D800", "Remove"),
    ({"negative_prompt": "a\udcffb"}, "negative_prompt is not valid text: its character 2 is U+DCFF", "Remove"),
    ({"guidance": 10**400}, "guidance = 1000", "nearest is 20"),
    ({"shift": -(10**400)}, "shift = -1000", "nearest is 0.01"),
    ({"shift": True}, "shift = True", "number"),
    ({"steps": 10**400}, "steps = 1000", "nearest is 100"),
    ({"seed": 10**5000}, "seed = a value of type int", "nearest is"),
    ({"image": 5}, "image = 5", "path"),
    ({"image": "x" * 9999}, "is not a file", "PNG"),
    ({"image": "a\0b"}, "is not a file", "PNG"),
]


@pytest.mark.parametrize(("values", "names", "fix"), BAD)
def test_bad_values_are_refused_with_value_and_fix(values, names, fix):
    with pytest.raises(RequestError) as error:
        load_preset("tiny").request(**values)
    assert names in str(error.value) and fix in str(error.value)
    assert len(str(error.value)) < 500


def test_the_longest_video_that_a_message_offers_is_taken():
    preset = load_preset("tiny")
    assert preset.request(height=928, width=1024, frames=441).frames == 441


def test_seed_minus_one_is_random_and_absent_is_the_default():
    preset = load_preset("tiny")
    assert preset.request().seed == preset.defaults.seed
    assert len({preset.request(seed=-1).seed for _ in range(4)}) > 1


def test_request_survives_json():
    request = load_preset("tiny").request(prompt="ä ⟂", negative_prompt="no", decode=DecodeSettings(path="reference"))
    assert Request.from_json(json.loads(json.dumps(request.to_json()))) == request


def test_request_from_json_names_unknown_and_missing_fields():
    values = load_preset("tiny").request().to_json()
    with pytest.raises(RequestError, match="colour"):
        Request.from_json(values | {"colour": 1})
    with pytest.raises(RequestError, match=r"^The request lacks prompt, seed\. "):
        Request.from_json({key: value for key, value in values.items() if key not in ("prompt", "seed")})


DEEP: list = []
for _ in range(5000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"image": 5}, "image = 5 must be the path"),
        ({"image": ["a"]}, r"image = \['a'\] must be the path"),
        ({"denoise": 5}, "denoise = 5 must be a table of precision"),
        ({"denoise": [1]}, r"denoise = \[1\] must be a table"),
        ({"decode": 0}, "decode = 0 must be a table of path, precision"),
        ({"decode": DEEP}, "decode = a value of type list must be a table"),
        ({"decode": {"path": DEEP}}, "decode path = a value of type list is not known"),
        ({"decode": {5: 5, "x": 1}}, "decode has no setting 5, x"),
        ({5: 5, "colour": 1}, "no field 5, colour"),
        ({"preset": 5}, "preset must be text"),
        ({"preset": None}, "preset must be text"),
    ],
)
def test_request_from_json_refuses_what_is_no_request(changed, words):
    with pytest.raises(RequestError, match=words):
        Request.from_json(load_preset("tiny").request().to_json() | changed)


@pytest.mark.parametrize("values", [None, [], "a", 5])
def test_request_from_json_wants_a_table(values):
    with pytest.raises(RequestError, match="must be a table"):
        Request.from_json(values)


def test_settings_refuse_unknown_values_and_keys():
    with pytest.raises(RequestError, match="denoise precision = 'fp4' is not known; choose one of auto, fp32"):
        DenoiseSettings(precision="fp4")
    with pytest.raises(RequestError, match="decode has no setting speed; it has path, precision"):
        DecodeSettings.from_dict({"speed": 9})


TOML = (Path(__file__).parents[2] / "presets" / "pan2.toml").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fps = 24", "fps = 24\ncolour = 1", "colour"),
        ("fps = 24", "", "fps"),
        ("steps = 50", "step = 50", "step"),
        ("height = 928", "height = 929", "929"),
        ("fps = 24", "fps = ", "TOML"),
        ("[limits]", "[limits]\nspeed = 1", "speed"),
        ('checkpoint = "IFM/PAN2"', "checkpoint = 5", "preset broken: checkpoint = 5 must be text"),
        ('checkpoint = "IFM/PAN2"', 'checkpoint = ""', "checkpoint is empty"),
        ("fps = 24", 'fps = "24"', "fps = '24' must be a whole number"),
        ("fps = 24", "fps = 23.976", r"fps = 23\.976 must be a whole number"),
        ("fps = 24", "fps = nan", "fps = nan must be a whole number"),
        ("fps = 24", "fps = true", "fps = True must be a whole number"),
        ("fps = 24", "fps = 0", "fps = 0 must lie between 1 and 240"),
        ("fps = 24", "fps = -24", "fps = -24 must lie between 1 and 240"),
        ("fps = 24", "fps = 1_000_000_000_000", "fps = 1000000000000 must lie between 1 and 240"),
        ("fps = 24", "fps = 1e12", r"fps = 1000000000000\.0 must be a whole number"),
        ("fps = 24", 'fps = 24\ndenoise = "bf16"', "denoise = 'bf16' must be a table of precision"),
        ("fps = 24", "fps = 24\ndecode = []", r"decode = \[\] must be a table"),
        ("fps = 24", 'fps = 24\ndecode = {path = "fast"}', "preset broken: decode path = 'fast' is not known"),
        ("fps = 24", f"fps = 24\ntitles = {'[' * 5000}{']' * 5000}", "nested too deeply"),
        ("fps = 24", f"fps = {'2' * 5000}", "not valid TOML"),
        ("steps = 200", 'steps = "100"', r"\[limits\]: steps = '100' must be a whole number"),
        ("steps = 200", "steps = 0", r"\[limits\]: steps = 0 must be at least 1"),
        ("steps = 200", "steps = 200\nguidance = inf", r"\[limits\]: guidance = inf must be a number"),
        ("steps = 200", "steps = 200\nmin_side = 0", r"\[limits\]: min_side = 0 must be at least 1"),
        ("steps = 200", 'steps = 200\nmin_side = "a"', r"\[limits\]: min_side = 'a' must be a whole number"),
        ("pixels = 983_040", "pixels = -1", r"pixels = -1 must be at least 4096 \(min_side \* min_side\)"),
        ("volume = 422_602_752", "volume = nan", r"\[limits\]: volume = nan must be a whole number"),
        ("shift = 9.0", "shift = [9]", r"\[defaults\]: shift = \[9\] must be a number"),
        ("seed = 123", "seed = 123\nprompt = 5", r"\[defaults\]: prompt = 5 must be text"),
        ("seed = 123", "seed = -1", r"\[defaults\]: seed = -1 must lie between"),
        ("label = ", "label = 1 #", r"\[\[sizes\]\]: label = 1 must be text"),
    ],
)
def test_a_broken_preset_says_what_is_wrong(old, new, message):
    assert old in TOML
    with pytest.raises(RequestError, match=message) as error:
        parse_preset(TOML.replace(old, new, 1), "broken")
    assert len(str(error.value)) < 500


HEAD, TABLES = TOML.partition("[defaults]")[0], "[defaults]" + TOML.partition("[defaults]")[2].partition("[[sizes]]")[0]
HEAD = HEAD.partition("examples")[0]


@pytest.mark.parametrize(
    ("line", "tables", "message"),
    [
        ("sizes = 5", TABLES, "sizes = 5 must be a list of tables"),
        ("sizes = [5]", TABLES, "must be a table, not 5"),
        ("sizes = {}", TABLES, "sizes = {} must be a list of tables"),
        ("examples = 5", TABLES, "examples = 5 must be a list of texts"),
        ("examples = [5]", TABLES, "examples = 5 must be text"),
        ('examples = "abc"', TABLES, "examples = 'abc' must be a list of texts"),
        (f'examples = ["{"x" * 20_001}"]', TABLES, "examples: prompt has 20001 characters"),
        ("", TABLES.replace("height = 704", "height = 700"), r"\[defaults\]: height = 700 must be a multiple of 32"),
        ("", TABLES.replace("steps = 50", "steps = 201"), r"\[defaults\]: steps = 201 must lie between 1 and 200"),
        ("defaults = 5", TABLES.partition("[limits]")[1] + TABLES.partition("[limits]")[2], "must be a table, not 5"),
    ],
)
def test_a_preset_without_sizes_or_examples_is_checked_too(line, tables, message):
    assert parse_preset(HEAD + TABLES, "whole").sizes == ()
    with pytest.raises(RequestError, match=message):
        parse_preset(f"{HEAD}{line}\n{tables}", "broken")


def test_a_preset_file_that_is_no_text_or_not_there_is_refused(tmp_path):
    (tmp_path / "a.toml").write_bytes(b'title = "\xff"')
    (tmp_path / "folder.toml").mkdir()
    for name, words in (("a", "UTF-8"), ("folder", "can be read"), ("absent", "can be read"), ("x" * 999, "can be")):
        with pytest.raises(RequestError, match=words):
            load_preset(str(tmp_path / f"{name}.toml"))


def test_what_lies_beyond_the_training_is_said_and_done():
    preset = load_preset("tiny")
    assert preset.beyond_training(preset.request()) is None
    assert preset.beyond_training(preset.request(height=320, width=320)) is None
    assert "size" in preset.beyond_training(preset.request(height=704, width=1248))
    assert "length" in preset.beyond_training(preset.request(frames=53))
    assert load_preset("pan2").beyond_training(load_preset("pan2").request(frames=481)) is None


def test_unknown_preset_lists_the_known_ones():
    with pytest.raises(RequestError, match="pan2, tiny"):
        load_preset("pan3")


def test_environment_chooses_preset_and_checkpoint(monkeypatch, tmp_path):
    monkeypatch.delenv("ENGINE_PRESET", raising=False)
    monkeypatch.delenv("ENGINE_CHECKPOINT", raising=False)
    assert preset_from_environment().name == "tiny"
    monkeypatch.setenv("ENGINE_CHECKPOINT", str(tmp_path))
    assert (preset_from_environment().name, preset_from_environment().checkpoint) == ("pan2", str(tmp_path))


def test_frames_and_latent_frames_are_inverse():
    for n in range(1, 122):
        assert latent_frames(video_frames(n)) == n
        assert nearest_frames(video_frames(n)) == video_frames(n)
    assert frames_of_seconds(2, 24) == 49 and frames_of_seconds(5, 24) == 121 and frames_of_seconds(20, 24) == 481
    assert latent_shape(241, 704, 1248) == (48, 61, 44, 78)
    assert [video_tokens(f, 704, 1248) for f in (241, 313, 481)] == [52338, 67782, 103818]


def test_the_fidelity_of_a_preset_is_what_was_measured_and_may_be_missing():
    assert load_preset("tiny").fidelity.balanced > load_preset("tiny").fidelity.draft
    assert load_preset("pan2").fidelity is None
    assert "dB from full" in quality_menu(load_preset("tiny"))[1][0]
    assert "not measured on this model" in quality_menu(load_preset("pan2"))[1][0]

"""Whatever is sent: it is taken, or refused as an EngineError in words. Nothing else is raised, nothing hangs."""

import io
import json
import math
import struct
from datetime import timedelta

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save

from engine import again
from engine.condition import check_picture, open_image
from engine.errors import EngineError
from engine.latents import load_latents
from engine.preset import load_preset
from engine.request import Request, check
from engine.settings import DecodeSettings
from engine.sides import parse_side
from engine.video import probe, read_settings
from engine.web.compare_form import CompareForm
from engine.web.form import Form, build_request, parse_size
from engine.web.hosting import Hosting

PRESET = load_preset("tiny")
FEW = settings(
    max_examples=60,
    deadline=timedelta(seconds=20),
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

# What JSON can hold, and what Python makes of it: NaN, infinities, numbers of a thousand digits, half characters.
TEXT = st.text(st.characters(), max_size=40) | st.sampled_from(
    ["\ud800", "\0", "../../etc/passwd", "1e999", "a" * 30_000]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), math.nan, math.inf, 2**63, True])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


def taken_or_refused(work):
    """Run `work`; an EngineError must have something to say."""
    try:
        return work()
    except EngineError as error:
        said = str(error)
        assert said.strip() and len(said) < 100_000
        said.encode("utf-8", "backslashreplace")
        return None


# ---- what is asked for


FIELDS = ("negative_prompt", "seconds", "height", "width", "steps", "guidance", "shift", "seed", "decoder")


@FEW
@given(st.fixed_dictionaries({"prompt": VALUES}, optional={name: VALUES for name in FIELDS}))
@example({"prompt": "a", "seconds": 10**400})
@example({"prompt": "a", "seed": 2**63})
@example({"prompt": "a", "decoder": [[]]})
def test_calls(values):
    call = {"image": None, "seconds": None, "decoder": None} | values
    request = taken_or_refused(lambda: build_request(PRESET, **call))
    if request is not None:
        json.dumps(request.to_json(), allow_nan=False).encode()


@FEW
@given(VALUES | st.dictionaries(st.sampled_from([*FIELDS, "preset", "image", "denoise", "decode", "prompt"]), VALUES))
def test_requests_from_json(values):
    taken_or_refused(lambda: check(Request.from_json(values), PRESET.limits))


@FEW
@given(st.dictionaries(st.sampled_from([*Form.__dataclass_fields__]), VALUES, max_size=4))
def test_the_form(values):
    form = Form(**(Form.of(PRESET).__dict__ | values))
    taken_or_refused(lambda: form.request(PRESET))
    taken_or_refused(lambda: form.sketch(PRESET))


@FEW
@given(VALUES)
def test_sizes_sides_and_decoders(value):
    taken_or_refused(lambda: parse_size(value))
    taken_or_refused(lambda: parse_side(value))
    taken_or_refused(lambda: DecodeSettings.from_dict(value))


@pytest.fixture(scope="module")
def bench():
    from tests.double import Double

    return Double(PRESET)


@FEW
@given(st.dictionaries(st.sampled_from([*CompareForm.__dataclass_fields__]), VALUES, max_size=4))
def test_the_form_of_a_comparison(bench, tmp_path, values):
    form = CompareForm(**({"source": "random", "job": None, "file": None, "seed": 1, "size": "64x64", "frames": 5} | {"a": "auto", "b": "auto"} | values))  # fmt: skip # noqa: E501
    taken_or_refused(lambda: form.request(bench, tmp_path))


SCALARS = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text('abc{}[]="\\\n', max_size=8)


@FEW
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
@example(b"[limits]\nsteps = 1")
@example(b"\xff\xfe")
@example(b"title = " + b"[" * 3000)
def test_presets_of_any_bytes(tmp_path, data):
    (tmp_path / "mine.toml").write_bytes(data)
    taken_or_refused(lambda: load_preset(str(tmp_path / "mine.toml")))


@FEW
@given(st.data())
def test_presets_with_a_value_changed(tmp_path, data):
    text = (load_text()).splitlines()
    places = [number for number, line in enumerate(text) if " = " in line]
    place = data.draw(st.sampled_from(places))
    value = data.draw(SCALARS)
    shown = json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")
    text[place] = f"{text[place].split(' = ')[0]} = {shown}"
    (tmp_path / "mine.toml").write_text("\n".join(text))
    taken_or_refused(lambda: load_preset(str(tmp_path / "mine.toml")))


def load_text():
    from pathlib import Path

    import presets

    return (Path(presets.__path__[0]) / "tiny.toml").read_text()


@FEW
@given(
    st.dictionaries(st.sampled_from([entry.metadata["name"] for entry in Hosting.__dataclass_fields__.values()]), TEXT)
)
def test_the_environment(values):
    taken_or_refused(lambda: Hosting.read(values))


# ---- what is uploaded


def picture(kind, size, **options):
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, kind, **options)
    return file.getvalue()


GOOD = [picture(kind, (9, 7)) for kind in ("PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF")]
LATENTS = save({"latents": torch.zeros(1, 48, 1, 4, 4)}, {"request": "{}", "preset": "tiny"})


@st.composite
def damaged(draw, whole):
    """Bytes of a good file, cut off and overwritten."""
    data = bytearray(draw(st.sampled_from(whole)))
    for _ in range(draw(st.integers(1, 8))):
        data[draw(st.integers(0, min(len(data), 200) - 1))] = draw(st.integers(0, 255))
    return bytes(data[: draw(st.integers(1, len(data)))])


@FEW
@given(st.binary(max_size=300) | damaged(GOOD))
@example(b"")
@example(b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"IHDR")
@example(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
@example(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
def test_pictures(tmp_path, data):
    (tmp_path / "a.png").write_bytes(data)
    image = taken_or_refused(lambda: open_image(tmp_path / "a.png"))
    if image is not None:
        assert image.mode == "RGB"
        taken_or_refused(lambda: check_picture(image, 256, 448))


@FEW
@given(st.binary(max_size=300) | damaged([LATENTS]))
@example(b"")
@example(b"\0" * 8)
@example(struct.pack("<Q", 2) + b"{}")
@example(struct.pack("<Q", 2**64 - 1))
@example(struct.pack("<Q", 9) + b'{"a":NaN}')
def test_latents(tmp_path, data):
    (tmp_path / "a.safetensors").write_bytes(data)
    taken_or_refused(lambda: load_latents(tmp_path / "a.safetensors"))
    taken_or_refused(lambda: again.of_file(tmp_path / "a.safetensors", DecodeSettings(), PRESET))


@FEW
@given(
    st.dictionaries(
        st.sampled_from(["request", "preset", "seed", "vae_sha256", "versions", "decode"]),
        TEXT | VALUES.map(json.dumps),
    )
)
@example({"request": "[" * 5000})
@example({"request": '{"prompt": NaN, "frames": 1e400}'})
@example({"request": "5"})
def test_latents_that_say_nonsense_of_themselves(tmp_path, notes):
    try:
        data = save({"latents": torch.zeros(1, 48, 1, 4, 4)}, notes)
    except Exception:
        # The format itself takes no half characters.
        return
    (tmp_path / "a.safetensors").write_bytes(data)
    taken_or_refused(lambda: again.of_file(tmp_path / "a.safetensors", DecodeSettings(), PRESET))


@settings(FEW, max_examples=12)
@given(st.binary(max_size=300))
@example(b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom" + b"\xff" * 100)
@example(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n")
def test_videos(tmp_path, data):
    (tmp_path / "a.mp4").write_bytes(data)
    taken_or_refused(lambda: probe(tmp_path / "a.mp4"))
    taken_or_refused(lambda: read_settings(tmp_path / "a.mp4"))

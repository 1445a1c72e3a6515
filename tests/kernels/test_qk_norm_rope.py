import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from kernels.qk_norm_rope import op
from kernels.qk_norm_rope.reference import Norms
from tests.engine.golden_case import DATA
from tests.kernels.truth import DTYPES, assert_as_good_as_plain, one_rounding

EPS = 1e-6
# batch, video tokens, text tokens, heads, head size
SIZES = [(1, 5, 3, 32, 128), (2, 7, 1, 4, 64), (1, 1, 5, 3, 8), (3, 17, 4, 2, 16), (1, 3, 2, 5, 96), (1, 2, 2, 1, 2)]
GOLDEN = ["qknorm_rope_bf16_s315", "qknorm_rope_bf16_s60", "qknorm_rope_f32_s1", "qknorm_rope_f32_s66_b2"]


def plain(video, text, norms, rope, eps=EPS):
    """As people write it, in the input's dtype throughout, with concatenations."""
    cos, sin = (table.to(video.dtype)[:, None] for table in rope)

    def norm(x, weight):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)

    def turn(x):
        a, b = x[..., ::2], x[..., 1::2]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)

    q = torch.cat((turn(norm(video[:, :, 0], norms.q)), norm(text[:, :, 0], norms.added_q)), dim=1)
    k = torch.cat((turn(norm(video[:, :, 1], norms.k)), norm(text[:, :, 1], norms.added_k)), dim=1)
    return torch.stack((q, k, torch.cat((video[:, :, 2], text[:, :, 2]), dim=1)), dim=2)


def exact(video, text, norms, rope):
    norms, rope = Norms(*(n.double().cpu() for n in norms)), [table.double().cpu() for table in rope]
    return plain(video.double().cpu(), text.double().cpu(), norms, rope)


def inputs(size, dtype, device):
    batch, video, text, heads, head = size
    qkv = [torch.randn(batch, tokens, 3, heads, head).to(device, dtype) for tokens in (video, text)]
    angles = 6 * torch.randn(video, head // 2)
    rope = angles.cos().to(device), angles.sin().to(device)
    return *qkv, Norms(*(1 + torch.randn(4, head) / 3).to(device, dtype)), rope


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_kernel_is_as_good_as_plain_operations(device, size, dtype):
    arguments = inputs(size, dtype, device)
    found, simple, truth = op.qk_norm_rope(*arguments), plain(*arguments), exact(*arguments)
    for part, what in enumerate(("queries", "keys")):
        assert_as_good_as_plain(found[:, :, part], simple[:, :, part], truth[:, :, part], what)
    assert torch.equal(found[:, :, 2], simple[:, :, 2])


@pytest.mark.parametrize("path", ["kernel", "reference"])
@pytest.mark.parametrize("name", GOLDEN)
def test_golden(request, name, path):
    """Magnitudes from 1e-3 to 30, a head of zeros, a head so small that epsilon decides. One rounding is allowed."""
    device = request.getfixturevalue("device") if path == "kernel" else torch.device("cpu")
    case = {key: value.to(device) for key, value in load_file(DATA / f"{name}.safetensors").items()}
    video, text = (
        torch.stack([case[f"inputs.{kind}{part}"] for part in ("q", "k", "k")], dim=2) for kind in ("", "text_")
    )
    norms = Norms(*(case[f"inputs.norm_{name}"] for name in ("q", "k", "added_q", "added_k")))
    out = op.qk_norm_rope(video, text, norms, (case["inputs.rope_cos"], case["inputs.rope_sin"]))
    tokens = video.shape[1]
    relative, floor = (one_rounding(device, path), 1e-3) if video.dtype == torch.bfloat16 else (1e-6, 1.0)
    for part, key in enumerate("qk"):
        for value, name in ((out[:, :tokens, part], key), (out[:, tokens:, part], f"text_{key}")):
            truth = case[f"output.{name}"].double()
            assert ((value.double() - truth).abs() <= relative * (truth.abs() + floor)).all(), name


def joint(size, dtype, device):
    """The products in the joint tensor, its two parts, and the rest of the arguments."""
    video, text, norms, rope = inputs(size, dtype, device)
    whole = torch.cat((video, text), dim=1)
    return whole, whole[:, : video.shape[1]], whole[:, video.shape[1] :], norms, rope


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_place_is_the_same_and_leaves_the_values_alone(device, dtype):
    whole, video, text, norms, rope = joint((2, 7, 3, 4, 16), dtype, device)
    expected = op.qk_norm_rope(video.clone(), text.clone(), norms, rope)
    assert not torch.equal(expected[:, :, :2], whole[:, :, :2])
    found = op.qk_norm_rope(video, text, norms, rope, out=whole)
    assert found is whole and torch.equal(found, expected)


@pytest.mark.parametrize("path", ["kernel", "reference"])
def test_text_queries_that_nobody_asks_for_are_left_alone(request, path):
    device = request.getfixturevalue("device") if path == "kernel" else torch.device("cpu")
    whole, video, text, norms, rope = joint((1, 5, 3, 2, 8), torch.float32, device)
    expected = op.qk_norm_rope(video.clone(), text.clone(), norms, rope)
    whole[:, 5:, 0] = float("nan")
    op.qk_norm_rope(video, text, norms, rope, out=whole, text_queries=False)
    assert whole[:, 5:, 0].isnan().all()
    assert torch.equal(whole[:, :5, 0], expected[:, :5, 0]) and torch.equal(whole[:, :, 1:], expected[:, :, 1:])


def test_strided_input_and_output(device):
    """Slices of larger products, an output of another layout, tables cut out of wider ones."""
    _, _, norms, rope = inputs((2, 5, 3, 2, 16), torch.bfloat16, device)
    video = torch.randn(2, 10, 2, 3, 16).to(device, torch.bfloat16).transpose(2, 3)[:, ::2]
    text = torch.randn(2, 3, 3, 4, 16).to(device, torch.bfloat16)[:, :, :, 1:3]
    out = torch.full((3, 2, 8, 2, 16), float("nan"), dtype=torch.bfloat16, device=device).permute(1, 2, 0, 3, 4)
    wide = tuple(torch.cat((table, table), dim=-1)[:, :8] for table in rope)
    expected = op.qk_norm_rope(video.contiguous(), text.contiguous(), norms, rope)
    assert torch.equal(op.qk_norm_rope(video, text, norms, wide, out=out), expected)


def test_offsets_beyond_32_bits(device):
    """Two tokens 2^31 values apart in memory that is never touched in between."""
    apart, shape = 2**31 + 64, (1, 2, 3, 2, 16)
    memory = torch.empty(apart + 96, dtype=torch.bfloat16, device=device)
    far = memory.as_strided(shape, (0, apart, 32, 16, 1))
    far.copy_(torch.randn(shape))
    _, text, norms, rope = inputs((1, 2, 1, 2, 16), torch.bfloat16, device)
    assert torch.equal(op.qk_norm_rope(far, text, norms, rope), op.qk_norm_rope(far.clone(), text, norms, rope))


def test_sizes_that_came_before_leave_no_trace(device):
    arguments = inputs((1, 9, 3, 2, 16), torch.bfloat16, device)
    first = op.qk_norm_rope(*arguments)
    op.qk_norm_rope(*inputs((2, 4, 6, 4, 8), torch.bfloat16, device))
    assert torch.equal(op.qk_norm_rope(*arguments), first)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"video": torch.zeros(1, 4, 2, 2, 8)}, r"video has shape \[1, 4, 2, 2, 8\], it must be \['any', 'any', 3"),
        ({"video": torch.zeros(1, 4, 3, 2, 7)}, r"the head size is 7, it must be even"),
        ({"text": torch.zeros(2, 2, 3, 2, 8)}, r"text has shape \[2, 2, 3, 2, 8\]"),
        ({"text": torch.zeros(1, 2, 3, 2, 8).half()}, r"text is torch.float16"),
        ({"norms": Norms(*torch.ones(4, 6))}, r"norms.q has shape \[6\], it must be \[8\]"),
        ({"rope": torch.ones(2, 3, 4)}, r"cosines has shape \[3, 4\], it must be \[4, 4\]"),
        ({"rope": torch.ones(2, 4, 4).bfloat16()}, r"cosines is torch.bfloat16, it must be torch.float32"),
        ({"out": torch.zeros(1, 5, 3, 2, 8)}, r"out has shape \[1, 5, 3, 2, 8\], it must be \[1, 6, 3, 2, 8\]"),
        ({"video": torch.zeros(1, 4, 3, 8, 2).transpose(3, 4)}, r"video has stride 2 in its last dimension"),
    ],
)
def test_what_does_not_fit_is_refused_in_words(change, words):
    arguments = {
        "video": torch.zeros(1, 4, 3, 2, 8),
        "text": torch.zeros(1, 2, 3, 2, 8),
        "norms": Norms(*torch.ones(4, 8)),
        "rope": tuple(torch.ones(2, 4, 4)),
    }
    with pytest.raises(ValueError, match=words):
        op.qk_norm_rope(**arguments | change)

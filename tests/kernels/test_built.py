"""The compiled convolutions' Python side on a CPU: what is refused, and that the right memory reaches the kernels."""

import ctypes
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernels.build import arch, preflight
from kernels.vae_decode import built, reference, tile_bench
from kernels.vae_decode.built import Built, Convolution, KernelError, Library, Stencil
from kernels.vae_decode.recipe import ELEMENTS, RECIPE, TILES
from kernels.vae_decode.tiles import NARROWING, TABLE, choose_tile
from tests.kernels.cpu_library import CpuLibrary

HOPPER, BLACKWELL, _ = arch.TARGETS
DTYPES = (torch.float16, torch.bfloat16)
CONVOLUTION_BYTES = ctypes.sizeof(Convolution)
HEADER = (RECIPE.folder / "convolution.h").read_text(encoding="utf-8")


def library(family="hopper", **more):
    return CpuLibrary([f"{tile}_{element}" for tile in TILES[family] for element in ELEMENTS], **more)


def on_cpu(target=HOPPER, **more):
    return Built(library(target.family, **more), target, torch.device("cpu"), multiprocessors=132)


def numbers(*shape, dtype=torch.float16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def truth(buffer, weight, bias, residual, pad_rows):
    """fp32, by PyTorch's convolution of what the 16-bit numbers stand for."""
    columns = weight.shape[3] // 2
    x = F.pad(buffer.float().permute(3, 0, 1, 2), (columns, columns, *pad_rows))
    y = F.conv3d(x[None], weight.float().permute(0, 4, 1, 2, 3))[0].permute(1, 2, 3, 0)
    y = y if bias is None else y + bias
    return y if residual is None else y + residual.float()


def close(y, wanted):
    assert torch.isfinite(y).all()
    torch.testing.assert_close(y.float(), wanted.float(), rtol=1e-2, atol=3e-2)


def poisoned(*shape, dtype=torch.float16):
    return torch.full(shape, float("nan"), dtype=dtype)


# ---- the right memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kernel", "pad_rows"), [((3, 3), (1, 1)), ((3, 3), (0, 1)), ((3, 3), (0, 0)), ((1, 1), (0, 0))]
)
def test_direct_hands_over_what_the_protocol_says(dtype, kernel, pad_rows):
    buffer, weight = numbers(5, 6, 7, 16, dtype=dtype), numbers(24, 3, *kernel, 16, dtype=dtype, seed=1) * 0.1
    height = 6 + sum(pad_rows) - kernel[0] + 1
    out, residual = poisoned(3, height, 7, 24, dtype=dtype), numbers(3, height, 7, 24, dtype=dtype, seed=2)
    bias = torch.randn(24, generator=torch.Generator().manual_seed(3))
    for b, r in ((bias, residual), (bias, None), (None, residual), (None, None)):
        out.fill_(float("nan"))
        on_cpu().direct(buffer, weight, b, r, out, pad_rows)
        close(out, truth(buffer, weight, b, r, pad_rows))


def test_rows_of_larger_frames_are_read_and_written_in_place():
    whole, weight = numbers(5, 9, 7, 16), numbers(8, 3, 3, 3, 16, seed=1) * 0.1
    frames, beside = poisoned(3, 11, 7, 8), numbers(3, 13, 7, 8, seed=2)
    device = on_cpu()
    device.direct(whole[:, 2:8], weight, None, beside[:, 5:9], frames[:, 3:7], (0, 0))
    close(frames[:, 3:7], truth(whole[:, 2:8], weight, None, beside[:, 5:9], (0, 0)))
    assert frames[:, :3].isnan().all() and frames[:, 7:].isnan().all()
    ((_, call),) = device.library.calls
    assert call.frames_apart and (call.x_step, call.residual_step, call.y_step) == (9 * 7 * 16, 13 * 7 * 8, 11 * 7 * 8)


def test_the_residual_may_be_where_the_output_goes():
    buffer, weight, out = numbers(4, 5, 7, 16), numbers(8, 3, 3, 3, 16, seed=1) * 0.1, numbers(2, 5, 7, 8, seed=2)
    wanted = truth(buffer, weight, None, out, (1, 1))
    on_cpu().direct(buffer, weight, None, out, out)
    close(out, wanted)


def test_packed_frames_are_one_product_and_a_single_frames_stride_says_nothing():
    device, weight = on_cpu(), numbers(8, 3, 3, 3, 16, seed=1) * 0.1
    device.direct(numbers(4, 5, 7, 16), weight, None, None, poisoned(2, 5, 7, 8))
    one = poisoned(4, 5, 7, 8)[2:3]
    device.direct(numbers(3, 5, 7, 16), weight, None, numbers(2, 9, 7, 8)[:1, 2:7], one)
    assert [call.frames_apart for _, call in device.library.calls] == [0, 0]


@pytest.mark.parametrize("kernel", [(3, 3), (3, 1), (1, 1), (2, 2)])
def test_phases_are_one_launch_over_their_own_data_and_weights(kernel):
    p, n, h, w, c, o = 6, 2, 5, 7, 16, 8
    inputs, weights = numbers(p, n, h, w, c), numbers(p, o, *kernel, c, seed=1) * 0.1
    for pads in (((1, 1), (1, 1)), ((0, 1), (1, 0)), ((0, 0), (0, 0))):
        rows, columns = (h + sum(pads[0]) - kernel[0] + 1, w + sum(pads[1]) - kernel[1] + 1)
        out, device = poisoned(p, n, rows, columns, o), on_cpu()
        device.phases(inputs, weights, out, *pads)
        for x, weight, y in zip(inputs, weights, out, strict=True):
            image = F.pad(x.float().permute(0, 3, 1, 2), (*pads[1], *pads[0]))
            close(y, F.conv2d(image, weight.float().permute(0, 3, 1, 2)).permute(0, 2, 3, 1))
        assert len(device.library.calls) == 1


def test_a_workspace_is_allocated_when_a_tile_wants_one():
    device = on_cpu(workspace_bytes=4096)
    device.direct(numbers(4, 5, 7, 16), numbers(8, 3, 3, 3, 16), None, None, poisoned(2, 5, 7, 8))
    ((_, call),) = device.library.calls
    assert call.workspace and call.workspace_bytes == 4096


# ---- which tile ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", TILES)
def test_every_row_names_a_tile_that_is_compiled_and_every_tile_is_used(family):
    rows = [*TABLE[family], *([NARROWING] if family == "hopper" else [])]
    assert {row.tile for row in rows} == set(TILES[family])
    assert TABLE[family][-1].filters == TABLE[family][-1].width == 0


def test_the_decoders_layers_get_the_tiles_that_won():
    measured = {
        (39, 1024, 1024, 3): "pingpong_128x128_2x1",
        (156, 256, 256, 3): "pingpong_128x128_2x1",
        (156, 1024, 1024): "cooperative_128x256_2x1",
        (78, 1024, 1024): "pingpong_128x128_2x1",
        (312, 512, 512): "cooperative_128x256",
        (312, 1024, 512): "cooperative_128x256",
        (624, 256, 256): "cooperative_256x128_1x2",
        (624, 512, 256): "cooperative_128x256_2x1",
    }
    assert {layer: choose_tile("hopper", *layer).tile for layer in measured} == measured


def test_the_tile_does_not_depend_on_the_plan():
    device, weight = on_cpu(), numbers(8, 3, 3, 3, 16)
    for frames, rows in ((3, 5), (9, 5), (3, 41)):
        device.direct(numbers(frames, rows, 7, 16), weight, None, None, poisoned(frames - 2, rows, 7, 8))
    assert len({(name, call.taps_first) for name, call in device.library.calls}) == 1


def test_the_bench_tries_every_tile_and_marks_the_fastest_and_the_tables(monkeypatch, capsys):
    monkeypatch.setattr(tile_bench, "LAYERS", (tile_bench.Layer(16, 8, 4, 5, 7),))
    device = on_cpu()

    def fake_time(run):
        device.library.calls.clear()
        run()
        ((name, call),) = device.library.calls
        return 1.0 if name.startswith("cooperative_256x128") and call.taps_first else 2.0

    assert tile_bench.main(device, fake_time) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    rows = json.loads(last)["rows"]
    assert [row["way"] for row in rows] == ["direct", "time", "time_width"] and all(
        len(row["tflops"]) == 8 for row in rows
    )
    marks = [line.split()[0::2] for line in lines if line.lstrip().startswith(("*", "<"))]
    assert marks == [["*", "cooperative_256x128_1x2", "first"], ["<", "pingpong_128x128_2x1"]] * 3


def test_the_bench_says_that_there_is_no_gpu(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tile_bench.main() == 1 and "need an NVIDIA GPU" in capsys.readouterr().err


# ---- refusals --------------------------------------------------------------------------------------------------------


def arguments(**changes):
    usual = {
        "buffer": numbers(4, 5, 7, 16), "weight": numbers(8, 3, 3, 3, 16), "bias": torch.zeros(8),
        "residual": numbers(2, 5, 7, 8), "out": poisoned(2, 5, 7, 8), "pad_rows": (1, 1),
    }  # fmt: skip
    return usual | changes


def misaligned(*shape):
    return torch.zeros(torch.Size(shape).numel() + 1, dtype=torch.float16)[1:].view(shape)


WRONG = {
    "fp32": (dict(buffer=torch.zeros(4, 5, 7, 16), weight=torch.zeros(8, 3, 3, 3, 16), residual=None,
                  out=torch.zeros(2, 5, 7, 8)), "the input is torch.float32"),
    "mixed types": (dict(weight=numbers(8, 3, 3, 3, 16, dtype=torch.bfloat16)), "they must be the same"),
    "channels": (dict(buffer=numbers(4, 5, 7, 12), weight=numbers(8, 3, 3, 3, 12)), "12 channels.*multiples of 8"),
    "filters": (dict(weight=numbers(12, 3, 3, 3, 16), bias=torch.zeros(12), residual=None, out=poisoned(2, 5, 7, 12)),
                "out has 12 channels.*multiples of 8"),
    "alignment": (dict(buffer=misaligned(4, 5, 7, 16)), "buffer begins at an address"),
    "alignment of out": (dict(out=misaligned(2, 5, 7, 8)), "out begins at an address"),
    "frame step": (dict(buffer=torch.zeros(4, 5 * 7 * 16 + 4, dtype=torch.float16).as_strided(
        (4, 5, 7, 16), (5 * 7 * 16 + 4, 7 * 16, 16, 1))), "buffer has 16 channels and strides.*multiples of 8"),
    "height": (dict(out=poisoned(2, 6, 7, 8), residual=None), r"out must be \[2, 5, 7, 8\]"),
    "depth": (dict(out=poisoned(4, 5, 7, 8), residual=None), r"out must be \[2, 5, 7, 8\]"),
    "rows apart": (dict(buffer=numbers(4, 5, 9, 16)[:, :, :7]), "one block of memory"),
    "pads": (dict(pad_rows=(2, 0)), "zeros are added as 0 or 1"),
    "bias": (dict(bias=torch.zeros(8, dtype=torch.float16)), "float32"),
    "kernel": (dict(weight=numbers(8, 3, 5, 5, 16)), "direct knows kernels"),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_nothing_starts_with_wrong_arguments(what):
    changes, words = WRONG[what]
    device = on_cpu()
    with pytest.raises(ValueError, match=words):
        device.direct(**arguments(**changes))
    assert not device.library.calls
    device.direct(**arguments())


def test_a_tensor_of_another_device_is_refused():
    elsewhere = Built(library(), HOPPER, torch.device("meta"), 132)
    with pytest.raises(ValueError, match="loaded for meta, the input is on cpu"):
        elsewhere.direct(**arguments())


def test_devices_without_kernels_say_so(monkeypatch):
    assert "need an NVIDIA GPU" in built.lack(torch.device("cpu"))
    with pytest.raises(ValueError, match="need an NVIDIA GPU"):
        Built.on(torch.device("cpu"))
    for capability, words in (((8, 9), "this GPU is sm_89"), ((12, 0), "this GPU is sm_120"), ((9, 0), None)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        said = built.lack(torch.device("cuda"))
        assert said is None if words is None else words in said


def test_the_passes_are_tritons_but_for_the_stencil():
    triton = pytest.importorskip("kernels.vae_decode.passes")
    device = on_cpu()
    ours = vars(device.passes())
    assert ours.pop("stencil") == device.stencil
    assert ours == {name: getattr(triton, name) for name in triton.__all__ if name != "stencil"}


# ---- the object itself -----------------------------------------------------------------------------------------------


class Loaded:
    """The functions of an object, as far as Library asks them; `code` is what a launch answers."""

    def __init__(self, code=0, size=CONVOLUTION_BYTES):
        self.code, self.size = code, size
        names = (b"a_fp16", b"b_bf16")
        self.convolution_bytes = lambda: self.size
        self.stencil_bytes = lambda: ctypes.sizeof(Stencil)
        self.tile_count = lambda: len(names)
        self.tile_name = _function(lambda i: names[i])
        self.cuda_error = _function(lambda code: f"CUDA error {code}".encode())
        self.run_convolution = _function(lambda tile, call, needed: self.code)
        self.run_stencil = _function(lambda call: self.code)


def _function(call):
    def function(*arguments):
        return call(*arguments)

    return function


def test_tiles_are_known_by_name():
    assert Library(Loaded()).tiles == {"a_fp16": 0, "b_bf16": 1}


def test_an_object_of_other_structures_is_refused():
    with pytest.raises(KernelError, match="not those of this program"):
        Library(Loaded(size=8))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (1, "no such tile"), (2, "sizes, pads or addresses"), (3, "can't compute this shape"), (4, "workspace"),
        (1209, "CUDA error 209; it was compiled for another GPU: python -m kernels.build"),
        (1700, "CUDA error 700"), (2007, "status 7"),
    ],
)  # fmt: skip
def test_every_code_becomes_words(code, words):
    loaded = Library(Loaded(code))
    for launch in (loaded.convolve, loaded.workspace):
        with pytest.raises(KernelError, match=words):
            launch(0, Convolution())
    with pytest.raises(KernelError, match="path portable or plain"):
        loaded.stencil(Stencil())


def test_python_and_c_agree_on_the_structures():
    for structure in (Convolution, Stencil):
        body = re.search(rf"struct {structure.__name__} {{(.*?)}};", HEADER, re.DOTALL)[1]
        lines = [line.split("//")[0].strip().rstrip(";") for line in body.splitlines()]
        fields = []
        for line in filter(None, lines):
            kind, _, rest = re.match(r"((const )?\w+\*?) (.*)", line).groups()
            pointer = kind.endswith("*")
            c_type = ctypes.c_void_p if pointer else {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}[kind]
            fields += [(name.strip(), c_type) for name in rest.split(",")]
        assert list(structure._fields_) == fields


def test_every_code_of_the_header_has_words():
    codes = dict(re.findall(r"k(\w+) = (\d+)", HEADER))
    small = {int(code) for name, code in codes.items() if int(code) < built.CUDA and name != "Done"}
    assert small == set(built.REFUSALS)
    assert (int(codes["CudaError"]), int(codes["CutlassError"])) == (built.CUDA, built.CUTLASS)


# ---- the stencil, run on the host ------------------------------------------------------------------------------------


def cuda_headers():
    """The folder with CUDA's headers, None where there is no toolkit."""
    nvcc = preflight.find_nvcc()
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *([nvcc.resolve().parents[1]] if nvcc else [])]
    return next((Path(home, "include") for home in homes if Path(home, "include/cuda_fp16.h").is_file()), None)


@pytest.fixture(scope="module")
def on_host(tmp_path_factory):
    """csrc/stencil.cu by a C++ compiler: each launch becomes a loop over blocks and threads."""
    headers, folder = cuda_headers(), tmp_path_factory.mktemp("stencil")
    if headers is None or shutil.which("g++") is None:
        pytest.skip("needs g++ and the headers of the CUDA toolkit")
    launch = re.compile(r"gather<(\w+)><<<grid, kThreads, 0, stream>>>\(\*s\);")
    source = (RECIPE.folder / "stencil.cu").read_text(encoding="utf-8")
    code, launches = launch.subn(r"run_on_host(gather<\1>, grid, kThreads, *s);", source)
    assert launches == 2
    (folder / "stencil.cpp").write_text('#include "stencil_host.h"\n' + code, encoding="utf-8")
    includes = [f"-I{place}" for place in (headers, Path(__file__).parent, RECIPE.folder)]
    command = ["g++", "-O1", "-std=c++17", "-shared", "-fPIC", *includes, "stencil.cpp", "-o", "stencil.so"]
    subprocess.run(command, cwd=folder, check=True)
    run = ctypes.CDLL(str(folder / "stencil.so")).run_stencil
    device = on_cpu()
    device.library.stencil = lambda call: Library._check(device.library, run(ctypes.byref(call)))
    return device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("t", "rows", "w", "channels"), [(1, 3, 1, 112), (3, 6, 130, 112), (2, 4, 5, 120)])
def test_the_stencil_has_the_bytes_of_its_reference(on_host, dtype, t, rows, w, channels):
    higher, bias = numbers(t, rows + 3, w, channels, dtype=dtype) * 0.5, numbers(12, dtype=torch.float32)
    values = higher[:, 1 : rows + 1]
    assert t == 1 or not values.is_contiguous()
    for kind, size, band in (
        (torch.float32, (t, rows + 1, w, 12), slice(1, rows - 1)),
        (torch.uint8, (t, 2 * rows, 2 * w, 3), slice(2, 2 * rows - 2)),
    ):
        out, wanted = (torch.full(size, 77, dtype=kind) for _ in range(2))
        flags = torch.ones(2, 1, dtype=torch.int32)
        on_host.stencil(out[:, band], values, bias, flags[0])
        reference.stencil(wanted[:, band], values, bias, flags[1])
        assert torch.equal(out, wanted) and flags.sum() == 2


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
def test_the_stencil_reports_one_value_that_is_not_finite(on_host, wrong):
    values, bias, finite = numbers(2, 5, 130, 112), torch.zeros(12), torch.ones(1, dtype=torch.int32)
    on_host.stencil(torch.empty(2, 6, 260, 3, dtype=torch.uint8), values, bias, finite)
    assert finite.item() == 1
    values[1, 2, 129, 30] = wrong
    on_host.stencil(torch.empty(2, 6, 260, 3, dtype=torch.uint8), values, bias, finite)
    assert finite.item() == 0


OTHER_PLANES = {
    "height": dict(out=torch.empty(2, 8, 14, 3, dtype=torch.uint8)),
    "depth": dict(out=torch.empty(1, 3, 7, 12)),
    "planes": dict(values=numbers(2, 5, 7, 104)),
    "bias": dict(bias=torch.zeros(16)),
}


@pytest.mark.parametrize("what", OTHER_PLANES)
def test_the_stencil_refuses_a_plane_of_another_size(on_host, what):
    usual = dict(out=torch.empty(2, 3, 7, 12), values=numbers(2, 5, 7, 112), bias=torch.zeros(12))
    finite = torch.ones(1, dtype=torch.int32)
    on_host.stencil(**usual, finite=finite)
    with pytest.raises(ValueError):
        on_host.stencil(**usual | OTHER_PLANES[what], finite=finite)


# ---- what CUTLASS makes of it ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_tile_of_every_product_reads_its_own_positions_and_filters(tmp_path):
    """The coordinates that the kernels give to the copy engine, computed on the host from the kernels' own code."""
    nvcc, folders = preflight.find_nvcc(), preflight.cutlass_folders()
    if nvcc is None or not folders or shutil.which("g++") is None:
        pytest.skip("needs nvcc, g++ and the CUTLASS headers (pip install nvidia-cutlass)")
    program, source = tmp_path / "coordinates", Path(__file__).with_name("coordinates.cu")
    places = [RECIPE.folder, folders[0] / "include", folders[0] / "tools/util/include"]
    flags = ["-std=c++17", "-O0", "-w", "-DNDEBUG", "--expt-relaxed-constexpr", *HOPPER.flags]
    includes = [f"-I{place}" for place in places]
    subprocess.run([str(nvcc), *flags, *includes, str(source), "-o", str(program)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r": 0 wrong of [1-9]\d{3}", done.stdout)) == 4

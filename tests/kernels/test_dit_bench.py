"""The benchmarks' code, at a size for a CPU: figures mean nothing, but every row is computed and right."""

import json

import pytest
import torch

from engine.fused import Streams
from kernels import dit_bench, dit_floor, dit_steps, timing
from kernels.kernel_bench import main as kernel_main
from kernels.modulate import bench as modulate_bench
from kernels.qk_norm_rope import bench as qk_norm_rope_bench

CPU = torch.device("cpu")
PEERS = {"plain", "plain-best-attention"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setitem(timing.COPY_BYTES, "cpu", 2**16)


def last_line(capsys) -> dict:
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_last_line_is_the_record(capsys):
    dit_bench.main(["--small", "--no-compile"])
    record = last_line(capsys)
    figures = {"tokens", "floor_ms", "floor_in_a_row_ms", "rows", "kernels"}
    assert set(record) == {"bench", "gpu", "torch", "date", "commit"} | figures
    assert record["bench"] == "dit" and record["tokens"] == 52
    assert record["floor_ms"] > 0 and record["floor_in_a_row_ms"] > 0
    names = [row["name"] for row in record["rows"]]
    assert set(names) >= PEERS and all(name.startswith(("plain", "ours")) for name in names)
    assert all(row["block_ms"] > 0 and row["in_a_row_ms"] > 0 for row in record["rows"])
    assert {row["name"] for row in record["rows"] if row.get("step_ms")} == PEERS | {"ours", "ours-fp8"}
    assert {kernel["name"] for kernel in record["kernels"]} >= {
        "modulate",
        "gated_modulate",
        "qk_norm_rope",
        "gelu_quantise_rows",
    }
    assert all(kernel["copy_share"] > 0 for kernel in record["kernels"])


def test_whole_steps_that_do_not_fit_into_the_budget_are_named(capsys):
    block = {"plain": 70.0, "plain-best-attention": 55.0, "compiled": 50.0, "ours": 46.0, "ours-fp8": 38.0}
    config = dit_bench.MMDiTConfig()
    assert dit_steps.affordable(block, config, 2, 1000) == list(dit_steps.WANTED)
    assert dit_steps.affordable(block, config, 2, 20) == ["ours", "ours-fp8"]
    assert "no whole step of plain: it takes 15 s, 2 s are left" in capsys.readouterr().out


@torch.no_grad()
def test_a_compiled_step_has_every_block_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(dit_steps.PAN2Transformer3DModel, "set_fused_kernels", lambda model, on: compiled.append(on))
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(type(module).__name__))
    size = dit_bench.SMALL
    found = dit_steps.steps(size.config, size.grid, size.text, CPU, ["compiled"], "math", 1)
    assert compiled == ["TransformerBlock", "TransformerBlock", False] and found["compiled"] > 0


@torch.no_grad()
def test_every_row_computes_the_same_block():
    bench = dit_bench.Bench(dit_bench.SMALL, CPU, torch.float32)
    calls = dit_bench.variants(bench, compiled=False)
    truth = bench.plain("math")
    assert 1e-3 < dit_bench.distance(calls.pop("ours-fp8")(), truth) < 0.1
    for name, call in calls.items():
        result = call()
        assert dit_bench.distance(result, truth) < 1e-5, name
        video, text = (result.x, result.c) if isinstance(result, Streams) else result
        torch.testing.assert_close(video, truth[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(text, truth[1], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_a_kernel_that_is_switched_off_is_not_called(monkeypatch):
    bench = dit_bench.Bench(dit_bench.SMALL, CPU, torch.float32)
    calls = dit_bench.variants(bench, compiled=False)
    for name, replaced in dit_bench.WITHOUT.items():
        for function in replaced:
            with monkeypatch.context() as patched:
                patched.setattr(dit_bench.fused, function, None)
                calls[f"ours-without-{name}"]()


def test_the_floor_has_every_product_of_a_block():
    """Weights of what the floor multiplies are those of the block, its modulations aside."""
    bench = dit_bench.Bench(dit_bench.SMALL, CPU)
    weights = sum(inputs * outputs for _, _, inputs, outputs in dit_floor.products(bench))
    names = [name for name, _ in bench.block.named_parameters() if name.endswith("weight") and "norm" not in name]
    assert weights == sum(bench.block.get_parameter(name).numel() for name in names)


@pytest.mark.parametrize("name, bench", [("modulate", modulate_bench), ("qk_norm_rope", qk_norm_rope_bench)])
def test_a_kernels_own_benchmark(capsys, name, bench):
    kernel_main(name, bench.passes, bench.sweep, ["--small", "--sweep"])
    record = last_line(capsys)
    assert record["bench"] == name and record["kernels"]


@pytest.mark.parametrize("bench", [modulate_bench, qk_norm_rope_bench])
def test_a_sweep_starts_every_size(device, bench):
    works = list(bench.sweep(5, 64, torch.bfloat16, device))
    assert len({work.name for work in works}) == len(works) >= 12
    for work in works[::5]:
        work.call()


def test_a_row_that_fails_is_named_and_the_others_are_measured(capsys):
    bench = dit_bench.Bench(dit_bench.SMALL, CPU)
    calls = {"ours": bench.ours, "compiled": lambda: 1 / 0}
    assert set(dit_bench.blocks(bench, calls, small=True)) == set(calls) == {"ours"}
    assert "compiled: failed: ZeroDivisionError: division by zero" in capsys.readouterr().out


def test_without_the_row_that_all_are_compared_with_it_ends_in_words(monkeypatch, capsys):
    monkeypatch.setattr(dit_bench.Bench, "plain", lambda bench, backend: 1 / 0)
    with pytest.raises(SystemExit, match="without plain; why is said above"):
        dit_bench.main(["--small", "--no-compile"])
    assert "plain: failed: ZeroDivisionError" in capsys.readouterr().out


def test_calls_take_turns_and_the_median_counts():
    order = []
    assert len(timing.medians([lambda: order.append("a"), lambda: order.append("b")], CPU, rounds=2, repeats=3)) == 2
    assert "".join(order) == "aabb" + 2 * "aaabbb"


def test_a_device_rests_before_each_turn(monkeypatch):
    slept = []
    monkeypatch.setattr(timing.time, "sleep", slept.append)
    timing.medians([lambda: None, lambda: None], CPU, rounds=3, repeats=1, rest=0.3)
    assert slept == 6 * [0.3]


def test_the_floor_in_a_row_is_every_product_and_one_attention(monkeypatch):
    bench = dit_bench.Bench(dit_bench.SMALL, CPU)
    least, all_of_them = dit_floor.floor(bench, 1)
    shapes = [tuple(result.shape) for result in all_of_them()]
    products = [(rows, outputs) for _, rows, _, outputs in dit_floor.products(bench)]
    assert least > 0 and len(shapes) == len(products) + 1
    assert [shape for shape in shapes if len(shape) == 2] == products


def test_tables_are_aligned():
    assert timing.table(("row", "ms"), [("a", 1.5), ("long", None)]) == "row   ms\na     1.500\nlong"

"""Compiles the Triton kernels at the released model's shapes for one GPU generation, without such a GPU, and prints as
JSON how each reads and writes memory. A program of its own: the tests' process defines kernels for the interpreter."""

import json
import re
import sys
from types import SimpleNamespace

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.modulate import kernel as modulate
from kernels.qk_norm_rope import kernel as qk_norm_rope
from kernels.quantise_rows import kernel as quantise_rows

WIDTH, HEADS, HEAD = 4096, 32, 128
POINTERS = dict.fromkeys(("gate", "shift", "scale", "scales", "cosines", "sines"), "*fp32") | {"values": "*fp8e4nv"}
INPUTS = ("x", "y", "residual", "out", "video", "text", "video_out", "text_out")
COUNTS = ("tokens", "count", "video_tokens", "text_tokens", "heads")  # of any value, so not known to be multiples of 16


def type_of(name: str, constants: dict) -> str:
    if name == "out" and constants.get("QUANTISE"):
        return "*fp8e4nv"
    if name in INPUTS or name.startswith("norm_"):
        return "*bf16"
    return POINTERS.get(name, "fp32" if name == "eps" else "i32")


def compiled(kernel, constants: dict, warps: int, capability: int) -> SimpleNamespace:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else type_of(name, constants) for name in names}
    aligned = [i for i, name in enumerate(names) if name not in (*constants, *COUNTS, "eps")]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps})


def cases():
    limits = {"UNIT": quantise_rows.UNIT, "LEAST": quantise_rows.LEAST}
    for quantised in (False, True):
        for gated in (False, True):
            size = modulate.launch_size(WIDTH)
            constants = {"WIDTH": WIDTH, "BLOCK": WIDTH, "ROWS": size.rows, "GATED": gated, "QUANTISE": quantised}
            name = f"modulate gated={gated}{' fp8' * quantised}"
            yield name, modulate.modulate_kernel, constants | limits, size.warps
    yield (
        "quantise_rows fp8",
        quantise_rows.quantise_rows_kernel,
        {"WIDTH": WIDTH, "BLOCK": WIDTH, "ROWS": 2} | limits,
        8,
    )
    size = quantise_rows.gelu_size(8 * WIDTH)
    constants = {"WIDTH": 8 * WIDTH, "CHUNK": size.chunk, "DIP": quantise_rows.DIP} | limits
    yield "gelu_quantise_rows fp8", quantise_rows.gelu_quantise_rows_kernel, constants, size.warps
    for copied in (False, True):
        size = qk_norm_rope.launch_size(HEADS, HEAD)
        constants = {"SIZE": HEAD, "BLOCK": HEAD, "TOKENS": size.tokens, "HEADS": size.heads}
        constants |= {"TEXT_QUERIES": True, "COPY_VALUES": copied}
        yield f"qk_norm_rope copied={copied}", qk_norm_rope.qk_norm_rope_kernel, constants, size.warps


def main(capability: int) -> None:
    found = {}
    for name, kernel, constants, warps in cases():
        ptx = compiled(kernel, constants, warps, capability).asm["ptx"]
        stores = re.findall(r"st\.global\S*", ptx)
        found[name] = {
            "stores": len(stores),
            "wide stores": sum(".v4.b32" in store for store in stores),
            "wide loads": len(re.findall(r"ld\.global\S*\.v4\.b32", ptx)),
            "local": len(re.findall(r"(?:ld|st)\.local", ptx)),
        }
    print(json.dumps(found))


main(int(sys.argv[1]))

#!/usr/bin/env bash
# Everything about the fast decoders that one GPU has to say: right first, then which way each layer would take by this
# run (results/table.json; the one that is used lies in kernels/vae_decode), then the record of kernels/vae_decode/
# benchmarks.md. About eight minutes of an H200; `decode.sh tests`, `layers` or `record` does one of the three.
# Results lie in $OUT (default: results). The bench needs diffusers and scikit-image.
set -euo pipefail
. "$(dirname "$0")/machine.sh"
out=${OUT:-results}
mkdir -p "$out"
"$python" -m kernels.build || echo "without compiled kernels"
if [ "${1:-tests}" = tests ]; then
    "$python" -m pytest -q tests/gpu/test_decode_kernels_cuda.py tests/gpu/test_decode_cuda.py 2>&1 | tee "$out/tests.txt"
fi
if [ "${1:-layers}" = layers ]; then
    "$python" -m kernels.vae_decode.bench --layers --out "$out" | tee "$out/layers.txt"
fi
if [ "${1:-record}" = record ]; then
    "$python" -m kernels.vae_decode.bench --frames 121,17,241 --repeat 1 --out "$out" | tee "$out/bench.txt"
    "$python" -m kernels.vae_decode.bench --frames 481 --only ours-built-fp16 --truth 5 --repeat 1 | tee "$out/long.txt"
fi

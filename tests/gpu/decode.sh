#!/usr/bin/env bash
# Everything about the fast decoders that one GPU has to say: right first, then which way each layer takes, then figures.
# Results lie in $OUT (default: results). The bench needs diffusers and scikit-image.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
out=${OUT:-results}
mkdir -p "$out"
"$python" -m pytest -q tests/gpu/test_decode_kernels_cuda.py tests/gpu/test_decode_cuda.py 2>&1 | tee "$out/tests.txt"
"$python" -m kernels.vae_decode.bench --layers --out "$out" | tee "$out/layers.txt"
cp "$out/table.json" kernels/vae_decode/table.json
"$python" -m kernels.vae_decode.bench --frames 121 --repeat 2 --stages --out "$out" | tee "$out/bench.txt"

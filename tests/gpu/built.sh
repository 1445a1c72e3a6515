#!/usr/bin/env bash
# Everything about the compiled kernels that a GPU has to say: build, numbers, sanitizer, and which tile is how fast.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
"$python" -m kernels.build
"$python" -m pytest -q -x tests/gpu/test_built_cuda.py
PYTHON="$python" bash tests/gpu/sanitize.sh
"$python" -m kernels.vae_decode.tile_bench

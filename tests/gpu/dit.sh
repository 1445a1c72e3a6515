#!/usr/bin/env bash
# Everything about the transformer's kernels that a GPU has to say: first whether they are right, then how fast.
# `dit.sh tests` and `dit.sh bench` do one of the two.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD
if [ "${1:-tests}" = tests ]; then
    "$python" -m pytest -q -rs -s tests/kernels/test_modulate.py tests/kernels/test_qk_norm_rope.py \
        tests/kernels/test_fused_kernels.py tests/gpu/test_fused_cuda.py
fi
if [ "${1:-bench}" = bench ]; then
    "$python" -m kernels.modulate.bench --sweep
    "$python" -m kernels.qk_norm_rope.bench --sweep
    "$python" -m kernels.dit_bench
fi

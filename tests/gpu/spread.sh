#!/usr/bin/env bash
# Everything about several devices that one GPU has to say: ranks that share it, by way of the host, give what one gives;
# what ends in words; and the prediction for 2, 4 and 8 GPUs. `spread.sh tests` and `spread.sh predict` do one of the two.
# Figures lie in $OUT (default: results).
set -euo pipefail
. "$(dirname "$0")/machine.sh"
out=${OUT:-results}
mkdir -p "$out"
"$python" -m kernels.build
if [ "${1:-tests}" = tests ]; then
    "$python" -m pytest -q -s -rs --durations=8 tests/gpu/test_spread_cuda.py 2>&1 | tee "$out/spread_tests.txt"
fi
if [ "${1:-predict}" = predict ]; then
    "$python" -m engine.spread_bench --devices 0 --random --path built --precision fp16 --frames 121 --repeats 2 \
        --out "$out/spread_prediction.json"
fi

#!/usr/bin/env bash
# On one GPU of 80 GiB or more: what of fp8, streamed blocks and the memory plan needs a device. Prints a short table last.
# Records go into engine/benchmarks.md. Packages that the machine lacks are taken from wheels/, made elsewhere by
# pip download -d wheels --no-deps diffusers imageio-ffmpeg importlib-metadata zipp
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.}
python=${PYTHON:-python3}
[ -d wheels ] && "$python" -m pip install -q --no-index --no-deps wheels/*.whl

failed=0
step() {
    local name=$1
    shift
    echo "== $name"
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    local code=$?
    tail -n 25 "$out/$name.log"
    [ $code -eq 0 ] || { failed=1; echo "-- $name: exit code $code"; }
}

limit=200 step tests "$python" -m pytest -q -m gpu tests/gpu/test_fp8_cuda.py tests/gpu/test_offload_cuda.py tests/kernels/test_quantise_rows.py
limit=150 step rehearsal "$python" -m engine.rehearse --shards 2
limit=100 step rehearsal_fp8 "$python" -m engine.rehearse --shards 0 --precision fp8
limit=150 step rehearsal_streamed "$python" -m engine.rehearse --shards 0 --offload blocks
for name in rehearsal rehearsal_fp8 rehearsal_streamed; do
    echo "$name: $(tail -n 1 "$out/$name.log" | cut -c1-1500)"
done
exit $failed

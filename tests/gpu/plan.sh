#!/usr/bin/env bash
# The full-size model with random weights on one GPU of 80 GiB or more: bf16 from noise to file, fp8, streamed blocks.
# `plan.sh bf16`, `plan.sh fp8`, `plan.sh streamed` do one. Whole logs and JSON lines in $OUT; records go into
# engine/benchmarks.md. Packages that the machine lacks are taken from wheels/, made elsewhere by
# pip download -d wheels --no-deps diffusers imageio-ffmpeg importlib-metadata zipp
set -uo pipefail
cd "$(dirname "$0")/../.."
out=${OUT:-.}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
[ -d wheels ] && "$python" -m pip install -q --no-index --no-deps wheels/*.whl
failed=0

rehearse() {
    echo "== rehearsal $1"
    timeout "$2" "$python" -m engine.rehearse "${@:3}" >"$out/rehearsal_$1.log" 2>&1 || failed=1
    grep -vE "^\{|Warning" "$out/rehearsal_$1.log" | tail -n 16 | cut -c1-300
}

bf16() { rehearse bf16 150 --steps 3 --shards 1; }
fp8() { rehearse fp8 100 --steps 2 --shards 0 --decoder none --precision fp8; }
streamed() { rehearse streamed 150 --steps 2 --shards 0 --decoder none --offload blocks; }

case ${1:-all} in
    all) bf16; fp8; streamed ;;
    bf16 | fp8 | streamed) "$1" ;;
    *) echo "plan.sh [bf16 | fp8 | streamed]" >&2 && exit 2 ;;
esac
exit $failed

#!/usr/bin/env bash
# The full-size model with random weights on one GPU of 80 GiB or more: bf16 from noise to file, fp8, streamed blocks.
# `plan.sh bf16`, `plan.sh fp8`, `plan.sh streamed` do one. Whole logs and JSON lines in $OUT; records go into
# engine/benchmarks.md.
set -uo pipefail
. "$(dirname "$0")/machine.sh"
out=${OUT:-.}
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

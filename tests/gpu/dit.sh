#!/usr/bin/env bash
# What the transformer's kernels need a GPU for: first whether they are right, then how fast. Short output; whole logs in
# $OUT. `dit.sh tests` (parallel, about a minute), `dit.sh bench` (about two), `dit.sh sweep` (launch sizes) do one part.
set -uo pipefail
. "$(dirname "$0")/machine.sh"
out=${OUT:-.}
failed=0

tests() {
    local pids=() names=() i
    start() {
        names+=("$1")
        timeout 170 "$python" -m pytest -q -rs -s "${@:2}" >"$out/$1.log" 2>&1 &
        pids+=($!)
    }
    start modulate tests/kernels/test_modulate.py
    start quantise tests/kernels/test_quantise_rows.py
    start joint tests/kernels/test_qk_norm_rope.py
    start model tests/kernels/test_fused_kernels.py
    start fused tests/gpu/test_fused_cuda.py
    start fp8 tests/gpu/test_fp8_cuda.py
    start offload tests/gpu/test_offload_cuda.py
    for i in "${!pids[@]}"; do
        wait "${pids[$i]}" || failed=1
        echo "== ${names[$i]}: $(tail -n 1 "$out/${names[$i]}.log")"
        grep -hE "^(FAILED|ERROR)|relative L2|final latents|^E  " "$out/${names[$i]}.log" | cut -c1-300 | head -n 20
    done
}

bench() {
    timeout 200 "$python" -m kernels.dit_bench 2>&1 | tee "$out/dit_bench.log" || failed=1
}

sweep() {
    for name in modulate qk_norm_rope quantise_rows; do
        timeout 100 "$python" -m "kernels.$name.bench" --sweep 2>&1 | tee "$out/sweep_$name.log" || failed=1
    done
}

case ${1:-all} in
    all) tests; bench ;;
    tests | bench | sweep) "$1" ;;
    *) echo "dit.sh [tests | bench | sweep]" >&2 && exit 2 ;;
esac
exit $failed

#!/usr/bin/env bash
# The application on one GPU, with the small preset: `app.sh tests` (about a minute), `app.sh cli` (two videos, a second
# decode and a comparison from the command line), `app.sh page` (the page, asked over its API). Whole logs in $OUT. What
# the machine lacks is said and passed over.
set -uo pipefail
. "$(dirname "$0")/machine.sh"
out=${OUT:-.}
failed=0
prompt="a red circle moves right on a plain navy background, static camera"

has() { "$python" -c "import $1" 2>/dev/null || { echo "== $1 is not installed: $2 is passed over"; return 1; }; }

step() {
    local name=$1
    timeout 120 "${@:2}" >"$out/app_$name.log" 2>&1
    local status=$?
    [ $status = 0 ] || failed=1
    echo "== $name: exit $status; $(tail -n 1 "$out/app_$name.log" | cut -c1-600)"
    [ $status = 0 ] || grep -E "Error|Warning|^E  " "$out/app_$name.log" | tail -n 20 | cut -c1-300
}

tests() {
    "$python" -m kernels.build >"$out/app_build.log" 2>&1 || echo "== no compiled kernels: $(tail -n 1 "$out/app_build.log")"
    timeout 240 "$python" -m pytest -q -s -rs --durations=8 tests/gpu/test_app_cuda.py >"$out/app_tests.log" 2>&1 || failed=1
    grep -hE "relative L2|dB|^Choice|^FAILED|^ERROR|^E  |SKIPPED| passed| failed|s (call|setup)" "$out/app_tests.log" | cut -c1-300
}

cli() {
    has imageio_ffmpeg "the command line" || return
    step video "$python" -m engine "$prompt" --seconds 2 --out "$out/app.mp4" --keep "$out/app_job" --json
    step onward "$python" -m engine "$prompt" --frames 17 --image "$out/app_job/last.png" --out "$out/app_onward.mp4" --json
    step again "$python" -m engine decode --latents "$out/app_job/latents.safetensors" --decode-path plain \
        --out "$out/app_again.mp4" --json
    has skimage "the comparison" || return
    step compare "$python" -m engine compare --latents "$out/app_job/latents.safetensors" --a auto --b reference --json
}

page() {
    has gradio "the page" && has imageio_ffmpeg "the page" || return
    "$python" app.py --preset tiny --port 7861 --outputs "$out/app_outputs" >"$out/app_page.log" 2>&1 &
    local server=$!
    step api "$python" tests/gpu/ask_page.py http://127.0.0.1:7861
    kill -INT $server
    wait $server
    grep -E "ERROR|Traceback|Error" "$out/app_page.log" | head -n 20
}

case ${1:-all} in
    all) tests; cli; page ;;
    tests | cli | page) "$1" ;;
    *) echo "app.sh [tests | cli | page]" >&2 && exit 2 ;;
esac
exit $failed

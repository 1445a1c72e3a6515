#!/usr/bin/env bash
# memcheck and racecheck of the compiled kernels on the GPU that is here. Exits non-zero at the first finding.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}

sanitizer=$(command -v compute-sanitizer || true)
for place in "${CUDA_HOME:-/usr/local/cuda}"/{bin,compute-sanitizer}/compute-sanitizer; do
    [ -n "$sanitizer" ] || [ ! -x "$place" ] || sanitizer=$place
done
[ -n "$sanitizer" ] || { echo "compute-sanitizer is not on the PATH and not under CUDA_HOME: install the CUDA toolkit." >&2; exit 2; }

"$python" -m kernels.build
# One allocation a tensor: inside PyTorch's pool a step over the edge of one tensor lands in another and goes unseen.
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 PYTHONPATH=.
for tool in memcheck racecheck; do
    echo "== $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$python" tests/gpu/sanitize.py
done

#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one go: builds the CUDA ops, runs tests/gpu, and again under
# compute-sanitizer where that is installed. What this machine cannot show is reported as "not run".
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PY:-.venv/bin/python}

if ! command -v nvidia-smi >/dev/null || ! nvidia-smi -L | grep -q GPU; then
  echo "test-gpu: not run: no NVIDIA GPU on this machine (nvidia-smi finds none)" >&2
  exit 2
fi
nvidia-smi -L
STALEFLOW_BUILD_CUDA=1 "$python" setup.py -q build_ext --inplace
"$python" -m pytest tests/gpu -m gpu -v "$@"

sanitizer=$(command -v compute-sanitizer || ls "${CUDA_HOME:-/usr/local/cuda}/bin/compute-sanitizer" 2>/dev/null || true)
if [ -n "$sanitizer" ]; then
  for tool in memcheck racecheck initcheck; do
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$python" -m pytest tests/gpu/test_ops_cuda.py -m gpu -q -k "not large"
  done
else
  echo "test-gpu: not run: compute-sanitizer (not in PATH or CUDA_HOME/bin)"
fi
if [ "$(nvidia-smi -L | grep -c GPU)" -lt 2 ]; then
  echo "test-gpu: not run: NCCL between several ranks (one GPU here)"
fi

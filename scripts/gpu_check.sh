#!/usr/bin/env bash
# Checks numerics and speed on one accelerator in at most eight minutes, and writes one JSON file.
# Usage: scripts/gpu_check.sh [FILE.json] [--tiny]; needs jax for the accelerator, flax, optax and jaxtyping, and no data.
# --tiny: sizes for any CPU, to see that it works. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"

#!/usr/bin/env bash
# What needs a CUDA device, in one go: the gpu tests, the quickstart on the device, and the training step's benchmark on
# OPT-1.3B's layer shape. Results go to the folder named first (default: outputs/gpu).
set -eu
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
out="${1:-outputs/gpu}"
mkdir -p "$out"
"$python" -m pytest -m gpu -p no:cacheprovider 2>&1 | tee "$out/tests.txt"
"$python" train.py --recipe quickstart output.dir="$out/quickstart" tracking.wandb=off
"$python" -m eval --checkpoint "$out/quickstart" --speedup 1 2 3 4 --output "$out/quickstart-eval"
"$python" scripts/benchmark_training_step.py --shape opt-1.3b --vocab-size 50272 --dtype bfloat16 --batch-size 8 \
    --prompt-length 128 --new-tokens 128 --speedup 2 3 4 5 2>&1 | tee "$out/training-step.txt"

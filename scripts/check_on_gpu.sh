#!/usr/bin/env bash
# Run all checks that need a CUDA device: the gpu tests, the quickstart, the training step with OPT-1.3B's shape, prompts
# as CUDA graphs and decoding speed with the shapes of OPT-1.3B and OPT-6.7B compared with transformers, weights in few
# bits, the engine beside static and continuous batching, and memory over thousands of calls. Results are written to the
# folder given as the first argument (default: outputs/gpu).
set -euo pipefail
cd "$(dirname "$0")/.."
python="${PYTHON:-.venv/bin/python}"
out="${1:-outputs/gpu}"
mkdir -p "$out"
"$python" -m pytest -m gpu -p no:cacheprovider 2>&1 | tee "$out/tests.txt"
"$python" train.py --recipe quickstart output.dir="$out/quickstart" tracking.wandb=off
"$python" -m eval --checkpoint "$out/quickstart" --speedup 1 2 3 4 --output "$out/quickstart-eval"
"$python" scripts/benchmark_training_step.py --shape opt-1.3b --vocab-size 50272 --dtype bfloat16 --batch-size 8 \
    --prompt-length 128 --new-tokens 128 --speedup 2 3 4 5 2>&1 | tee "$out/training-step.txt"
for shape in opt-1.3b opt-6.7b; do
    "$python" scripts/benchmark_prompt_graphs.py --shape "$shape" --vocab-size 50272 --dtype bfloat16 --batch-size 1 8 32 \
        2>&1 | tee "$out/prompt-graphs-$shape.txt"
    rm -f "$out/speed-$shape".*
    "$python" -m eval.speed --model "$shape" --dtype bfloat16 --batch-size 1 8 32 --speedup 1 2 3 4 5 --profile \
        --peers transformers transformers-static --output "$out/speed-$shape.json" 2>&1 | tee "$out/speed-$shape.txt"
done
# Weights in 8 and 4 bits beside bfloat16, with skipping on top. The targets at full depth: 1.6x and 2.2x of bfloat16's.
rm -f "$out"/speed-few-bits.*
"$python" -m eval.speed --model opt-6.7b --dtype bfloat16 --weights model int8 int4 --batch-size 1 --speedup 1 2 3 \
    --repeats 3 --peers --output "$out/speed-few-bits.json" 2>&1 | tee "$out/speed-few-bits.txt"
# The engine: at 32 requests, 0.9 of a static batch's tokens per second.
"$python" scripts/benchmark_engine.py --shape opt-1.3b --vocab-size 50272 --dtype bfloat16 2>&1 | tee "$out/engine.txt"
"$python" scripts/soak.py --calls 2000 | tee "$out/soak.txt"

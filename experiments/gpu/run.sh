#!/usr/bin/env bash
# Everything that a CUDA device must show, in at most ten minutes: the marked tests and the levels side by side.
#   experiments/gpu/run.sh [directory for the results]
set -euo pipefail
cd "$(dirname "$0")/../.."
out=${1:-experiments/gpu}
python=${PYTHON:-python}
timeout 300 "$python" -m pytest -m gpu -q -p no:cacheprovider | tee "$out/tests.txt"
timeout 120 "$python" experiments/step_overhead/benchmark.py --device cuda --results "$out/step_overhead.json"
for level in O0 O1 O2 O3; do
  timeout 60 "$python" -m ampexp device=cuda network=resnet20 "level=$level" trainer.epochs=3 tracker=none \
    trainer.progress=none | tee "$out/resnet20_$level.txt"
done

#!/usr/bin/env bash
# The main job at every level, in the directory it is started from; the tables go to results.txt beside this script.
set -euo pipefail
results="$(cd "$(dirname "$0")" && pwd)/results.txt"
{ date -u +%F; grep -m1 "model name" /proc/cpuinfo; nproc; } > "$results"
for level in O0 O1 O2 O3 auto; do
  ${PYTHON:-python} -m ampexp "level=$level" boost_level=O1 trainer.progress=none | grep -v "recorded at\|tracking:" | tee -a "$results"
done

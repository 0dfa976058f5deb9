#!/usr/bin/env bash
# Everything that docs/results/turboconn.md shows, on two CPU cores. Runs are kept in runs/ and not trained again.
#   make models first: the retrofit needs models/SmolLM2-135M-Instruct
set -euo pipefail
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
page=docs/results/turboconn
mkdir -p "$page"

for study in turboconn-rates turboconn-parity turboconn-arithmetic turboconn-lengths; do
    "$undertow" study "recipes/cpu/study-$study.yaml"
    cp "runs/$study/summary.json" "$page/$study.json"
    cp "runs/$study/losses.png" "$page/$study.png"
done

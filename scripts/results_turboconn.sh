#!/usr/bin/env bash
# All of docs/results/turboconn.md: some two and a half hours on two CPU cores, twenty minutes of it the retrofit's.
#
#     make models
#     scripts/results_turboconn.sh bbh_multistep_arithmetic_two.json gsm8k_test.jsonl
#
# Runs are kept in runs/, and what is finished there is not trained again. Times are taken last, on a machine that must
# then be idle.
set -euo pipefail
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
bbh=$1
gsm8k=$2
page=docs/results/turboconn
mkdir -p "$page"

for study in turboconn-rates turboconn-parity turboconn-lengths turboconn-arithmetic turboconn-smollm2; do
    "$undertow" study "recipes/cpu/study-$study.yaml"
    cp "runs/$study/summary.json" "$page/$study.json"
    cp "runs/$study/losses.png" "$page/$study.png"
done
parity=runs/turboconn-parity
"$undertow" inspect lengths $parity/Transformer $parity/soft-token $parity/lag-1-alpha-1 $parity/lag-1-alpha-10 $parity/lag-4-alpha-1 --output "$page"
"$undertow" inspect lengths runs/turboconn-lengths --output "$page/to-10-digits"
"$undertow" inspect choices runs/turboconn-arithmetic > "$page/choices.md"

# Data sets of others, whatever a small model makes of them.
"$undertow" eval runs/turboconn-arithmetic/lag-1-alpha-1/seed-0 --task=bbh-arithmetic --task.template=bare --data="$bbh"
"$undertow" eval runs/turboconn-smollm2/TurboConn-and-LoRA --task=gsm8k --data="$gsm8k" --evaluation.examples=48 --evaluation.batch=16 \
    --evaluation.max_new_tokens=8

# Sixty steps of each combination, one at a time, for the time of a step.
for study in turboconn-parity turboconn-arithmetic; do
    "$undertow" study "recipes/cpu/study-$study.yaml" --name="$study-times" --seeds=[0] --workers=1 \
        --recipe.training.steps=60 --recipe.training.evaluate_every=60 --recipe.evaluation.examples=64
    mkdir -p "$page/$study-times"
    "$undertow" inspect latency "runs/$study-times" --output "$page/$study-times"
done

# The speed of generation, the memory and the time of a training step: scripts/results_speed.sh

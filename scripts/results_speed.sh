#!/usr/bin/env bash
# All measurements of docs/results/speed.md, about half an hour on two idle cores. A JSON and a table each.
set -euo pipefail
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
run() { # name, settings...
    local name=$1
    shift
    "$undertow" bench "$@" --output "docs/results/speed/$name" 2>/dev/null
}
threads=(--threads=2 --rounds=3)

# T²MLR on 6, 14 and all of 30 layers.
run t2mlr-6-of-30 "${threads[@]}" --measures=[train,memory]
run t2mlr-14-of-30 "${threads[@]}" --measures=[train] --recurrence='{kind: t2mlr, first_layer: 8, last_layer: 21}'
run t2mlr-30-of-30 "${threads[@]}" --measures=[train] --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}' \
    --only='[auto, "scan(1,1)", "scan(2,1)", "scan(2), adjoint(1)", "scan(1), adjoint(1)", "jacobi(16,4), the paper'"'"'s"]'
# A small model: T²MLR on 4 of 6 layers.
run t2mlr-4-of-6 "${threads[@]}" --measures=[train,decode] --layers=6 --batch=16 --tokens=128 \
    --recurrence='{kind: t2mlr, first_layer: 1, last_layer: 4}'

# TurboConn: fifteen connections on sixteen layers, with two threads and with one.
turboconn=(--layers=16 --tokens=128 --batch=16 --rounds=3)
run turboconn-lag-4 "${turboconn[@]}" --threads=2 --measures=[train,memory,decode] --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run turboconn-lag-4-one-thread "${turboconn[@]}" --threads=1 --measures=[train] --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run turboconn-lag-1 "${turboconn[@]}" --threads=2 --measures=[train] --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24, lag: 1}' \
    --only='[auto, exact, "exact states, adjoint(1)", "exact, the paper'"'"'s loop taken literally"]'

# Prefill and decoding: the usual shape, and a narrow one with a recurrence over the whole stack, bound by launches.
run inference "${threads[@]}" --measures=[prefill,decode]
run prefill-narrow "${threads[@]}" --measures=[prefill] --width=32 --heads=2 --key_value_heads=1 --head_width=16 \
    --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}'

# As the sequence grows.
for tokens in 512 2048 8192; do
    run tokens-$tokens "${threads[@]}" --measures=[train] --layers=12 --width=96 --head_width=24 --batch=1 --tokens=$tokens \
        --recurrence='{kind: t2mlr, first_layer: 4, last_layer: 6}' --only='[exact, "exact states, adjoint(1)", "scan(2,1)", "scan(2), adjoint(1)"]'
done

#!/usr/bin/env bash
# All measurements of docs/results/speed.md, some twenty minutes on two idle cores. A JSON and a table each.
set -euo pipefail
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
run() { # name, settings...
    local name=$1
    shift
    "$undertow" bench --rounds=3 "$@" --output "docs/results/speed/$name" 2>/dev/null
}
literal="exact, the paper's loop taken literally"
jacobi="jacobi(16,4), the paper's"

# T²MLR on 6, 14 and all of 30 layers, and on 4 of 6.
run t2mlr-6-of-30 --threads=2 --measures=[train]
run t2mlr-14-of-30 --threads=2 --measures=[train] --recurrence='{kind: t2mlr, first_layer: 8, last_layer: 21}' \
    --only="[auto, 'exact', 'exact states, adjoint(1)', 'scan(1,1)', 'scan(2,1)', 'scan(1), adjoint(1)', 'scan(2), adjoint(1)', \"$jacobi\"]"
run t2mlr-30-of-30 --threads=2 --measures=[train] --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}' \
    --only="[auto, 'scan(1,1)', 'scan(2,1)', 'scan(1), adjoint(1)', 'scan(2), adjoint(1)', \"$jacobi\"]"
run t2mlr-4-of-6 --threads=2 --measures=[train,decode] --layers=6 --batch=16 --tokens=128 \
    --recurrence='{kind: t2mlr, first_layer: 1, last_layer: 4}'

# TurboConn: fifteen connections on sixteen layers, with two threads and with one.
turboconn=(--layers=16 --tokens=128 --batch=16 --measures=[train])
run turboconn-lag-4 "${turboconn[@]}" --threads=2 --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run turboconn-lag-4-one-thread "${turboconn[@]}" --threads=1 --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run turboconn-lag-1 "${turboconn[@]}" --threads=2 --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24, lag: 1}' \
    --only="[auto, exact, 'exact states, adjoint(1)', \"$literal\"]"

# Prefill and decoding: the usual shape, and a narrow one with a recurrence over the whole stack, bound by launches.
run inference --threads=2 --measures=[prefill,decode]
run decode-turboconn --threads=2 --layers=16 --measures=[decode] --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run prefill-narrow --threads=1 --measures=[prefill] --width=32 --heads=2 --key_value_heads=1 --head_width=16 --rounds=1 \
    --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}'

# As the sequence grows.
for tokens in 512 2048 8192; do
    run tokens-$tokens --threads=2 --measures=[train] --layers=12 --width=96 --head_width=24 --batch=1 --tokens=$tokens --rounds=2 \
        --recurrence='{kind: t2mlr, first_layer: 4, last_layer: 6}' --only="[exact, 'exact states, adjoint(1)', 'scan(2), adjoint(1)']"
done

# Peak memory.
run memory-t2mlr --threads=1 --measures=[memory]
run memory-turboconn --threads=1 --measures=[memory] --layers=16 --tokens=128 --batch=16 \
    --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'

#!/usr/bin/env bash
# All measurements of docs/results/speed.md, some twenty-five minutes on two idle cores, five of them a training. A JSON and a table each. Give it a text for
# the prefill of trained models: scripts/results_speed.sh tinyshakespeare.txt
set -euo pipefail
text=$(realpath "${1:?give a text file}")
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
run() { # name, settings...
    local name=$1
    shift
    "$undertow" bench "$@" --output "docs/results/speed/$name" 2>/dev/null
}
literal="exact, the paper's loop taken literally"
jacobi="jacobi(16,4), the paper's"
ours="auto, 'scan(1), adjoint(1)', 'scan(2), adjoint(1)', 'scan(2,1)'"

# T²MLR on 6, 14 and all of 30 layers, and on 4 of 6. The literal loop takes as long as all others together: one round.
train=(--threads=2 --measures=[train] --rounds=3)
run t2mlr-6-of-30 "${train[@]}" --only="[$ours, 'exact', 'exact states, adjoint(1)', \"$jacobi\"]"
run t2mlr-6-of-30-literal "${train[@]}" --rounds=1 --only="[\"$literal\"]"
run t2mlr-14-of-30 "${train[@]}" --recurrence='{kind: t2mlr, first_layer: 8, last_layer: 21}' --only="[$ours, \"$jacobi\"]"
run t2mlr-30-of-30 "${train[@]}" --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}' --only="[$ours]"
run t2mlr-4-of-6 "${train[@]}" --layers=6 --batch=16 --tokens=128 --recurrence='{kind: t2mlr, first_layer: 1, last_layer: 4}' \
    --only="[$ours, 'exact', 'exact states, adjoint(1)', \"$jacobi\"]"

# TurboConn: fifteen connections on sixteen layers, with two threads and with one.
exact="'exact', 'exact states, adjoint(1)', \"$literal\""
turboconn=(--layers=16 --tokens=128 --batch=16 --measures=[train])
run turboconn-lag-4 "${turboconn[@]}" --threads=2 --rounds=3 \
    --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}' --only="['scan(1), adjoint(1)', $exact]"
run turboconn-lag-4-one-thread "${turboconn[@]}" --threads=1 --rounds=2 \
    --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}' --only="['scan(1), adjoint(1)', $exact]"
run turboconn-lag-1 "${turboconn[@]}" --threads=2 --rounds=2 \
    --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24, lag: 1}' --only="[$exact]"

# Prefill: the usual shape, and a narrow one with a recurrence over the whole stack, bound by launches.
run prefill --threads=2 --measures=[prefill] --rounds=2
run prefill-narrow --threads=1 --measures=[prefill] --width=32 --heads=2 --key_value_heads=1 --head_width=16 --rounds=1 \
    --recurrence='{kind: t2mlr, first_layer: 0, last_layer: 29}'

# The same narrow shape trained on text, and how far each solver's logits are from the rollout's then.
"$undertow" train recipes/cpu/text-narrow.yaml --task.files="[$text]"
"${PYTHON:-.venv/bin/python}" scripts/measure_prefill.py runs/text-narrow "$text" --rounds=1 --output docs/results/speed/prefill-trained.json

# Decoding: narrow models, bound by launches, and the papers' own: SmolLM2-135M, and Llama-3.2-1B with its wiring and rank.
decode=(--threads=2 --measures=[decode])
run decode-t2mlr "${decode[@]}" --rounds=5
run decode-turboconn "${decode[@]}" --rounds=5 --layers=16 --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
run decode-smollm2-135m "${decode[@]}" --rounds=4 --width=576 --heads=9 --key_value_heads=3 --head_width=64
run decode-llama-1b "${decode[@]}" --rounds=3 --generated=24 --layers=16 --width=2048 --heads=32 --key_value_heads=8 \
    --head_width=64 --recurrence='{kind: turboconn, preset: llama-3.2-1b}'

# As the sequence grows, one row. The rollout's full gradient is left out where a step of it takes minutes.
growth=(--threads=2 --measures=[train] --layers=12 --width=96 --head_width=24 --batch=1
    --recurrence='{kind: t2mlr, first_layer: 4, last_layer: 6}')
run tokens-512 "${growth[@]}" --tokens=512 --rounds=3 --only="['exact', 'exact states, adjoint(1)', 'scan(2), adjoint(1)']"
run tokens-2048 "${growth[@]}" --tokens=2048 --rounds=2 --only="['exact', 'exact states, adjoint(1)', 'scan(2), adjoint(1)']"
run tokens-8192 "${growth[@]}" --tokens=8192 --rounds=1 --only="['exact states, adjoint(1)', 'scan(2), adjoint(1)']"

# Peak memory.
memory=(--threads=1 --measures=[memory])
run memory-t2mlr "${memory[@]}" --only="['exact', 'exact states, adjoint(1)', 'scan(2), adjoint(1)', 'scan(2,1)', \"$jacobi\"]"
run memory-turboconn "${memory[@]}" --layers=16 --tokens=128 --batch=16 \
    --recurrence='{kind: turboconn, preset: llama-3.2-1b, rank: 24}' --only="['scan(1), adjoint(1)', $exact]"

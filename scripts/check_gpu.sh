#!/usr/bin/env bash
# What a machine with a GPU alone can settle, in under ten minutes: scripts/check_gpu.sh [FOLDER]
# CUDA and Triton tests, compiled and captured steps against eager ones among them, then speed and
# memory of the shapes of docs/results/speed.md in bfloat16, with PyTorch's attention and, where
# flash-attn is installed, with that, eager and compiled. A report a step in FOLDER
# (gpu-check unless given); every step runs, and the exit status is 1 where one failed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
undertow=${UNDERTOW:-.venv/bin/undertow}
folder=${1:-gpu-check}
mkdir -p "$folder"
failed=0

step() { # name, seconds at most, command...
    local name=$1 limit=$2 begun=$SECONDS
    shift 2
    timeout "$limit" "$@" >"$folder/$name.txt" 2>&1
    local status=$?
    if [ $status -ne 0 ]; then failed=1; fi
    echo "$name: exit $status, $((SECONDS - begun)) s" | tee -a "$folder/summary.txt"
}

bench() { # name, settings...
    local name=$1 limit=60
    case $name in *-compiled) limit=120 ;; esac
    shift
    step "bench-$name" "$limit" "$undertow" bench --device=cuda --precision=bfloat16 --rounds=3 \
        "$@" --output "$folder/$name"
}

: >"$folder/summary.txt"
step device 30 "$python" -c 'import torch; print(torch.__version__, torch.cuda.get_device_name())'
step tests 200 env HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false \
    "$python" -m pytest -m gpu -p no:cacheprovider

attentions=(sdpa)
if "$python" -c 'import flash_attn' 2>/dev/null; then attentions+=(flash_attention_2); fi
turboconn='{kind: turboconn, preset: llama-3.2-1b, rank: 24}'
text="[auto, 'scan(1), adjoint(1)', 'scan(2,1)', exact]"
for attention in "${attentions[@]}"; do
    bench "t2mlr-$attention" --attention="$attention" --width=576 --heads=9 --key_value_heads=3 \
        --head_width=64 --measures='[train, prefill, decode, memory]' --only="$text"
    bench "turboconn-$attention" --attention="$attention" --layers=16 --width=512 --heads=8 \
        --key_value_heads=2 --head_width=64 --tokens=128 --batch=16 --recurrence="$turboconn" \
        --measures='[train, decode, memory]' --only="[exact, 'exact states, adjoint(1)']"
done
bench t2mlr-compiled --width=576 --heads=9 --key_value_heads=3 --head_width=64 --compile=regional \
    --measures='[train, decode]' --decoding='[dynamic, compiled]' --rows='[1]' \
    --only="['scan(1), adjoint(1)', exact]"
bench turboconn-compiled --layers=16 --width=512 --heads=8 --key_value_heads=2 --head_width=64 \
    --tokens=128 --batch=16 --recurrence="$turboconn" --compile=regional \
    --measures='[train, decode]' --decoding='[dynamic, compiled]' --rows='[1]' --only='[exact]'
cat "$folder/summary.txt"
exit $failed

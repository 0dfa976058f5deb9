#!/usr/bin/env bash
# All of docs/results/t2mlr.md, some five hours on two CPU cores (an estimate), half of it SmolLM2's.
#
#     make models
#     scripts/results_t2mlr.sh tinyshakespeare.txt gsm8k_train.jsonl gsm8k_test.jsonl
#
# Runs are kept in runs/, and what is finished there is not trained again. The solvers on text and on S5 are
# docs/results/solvers.md's, whose studies are among these.
set -euo pipefail
text=$(realpath "${1:?give a text file}")
train=$(realpath "${2:?give GSM8K training problems}")
test=$(realpath "${3:?give GSM8K test problems}")
cd "$(dirname "$0")/.."
undertow=${UNDERTOW:-.venv/bin/undertow}
python=${PYTHON:-.venv/bin/python}
page=docs/results/t2mlr
mkdir -p "$page"

study() { # name, settings...
    local name=$1
    shift
    "$undertow" study "recipes/cpu/study-$name.yaml" "$@"
    cp "runs/$name/summary.json" "$page/$name.json"
    cp "runs/$name/losses.png" "$page/$name.png"
}
"$undertow" study recipes/cpu/study-solvers-s5.yaml # its table and figure are those of solvers.md
study t2mlr-retrieval
"$python" scripts/score_retrieval.py runs/t2mlr-retrieval --output "$page/t2mlr-retrieval-halves.json"
study t2mlr-variables
study t2mlr-prosqa
study t2mlr-blocks-s3
study t2mlr-blocks --recipe.task.files="[$text]"
study t2mlr-smollm2 --recipe.task.train="$train" --recipe.task.test="$test"

# What the recurrence does in the language models: gates over training, loss and state by position, probes on each layer, and
# how near each solver's gradient is to the exact one there.
recurrent=runs/t2mlr-blocks/3-to-4
"$undertow" inspect gates $recurrent > "$page/gates.md"
"$undertow" inspect positions $recurrent --examples=256 > "$page/positions.md"
"$undertow" inspect probes $recurrent --baseline=runs/t2mlr-blocks/none --examples=256 > "$page/probes.md"
for block in 3-to-4 1-to-6; do
    "$undertow" inspect fidelity runs/t2mlr-blocks/$block > "$page/fidelity-$block.md"
    cp runs/t2mlr-blocks/$block/fidelity.png "$page/fidelity-$block.png"
done
cp $recurrent/{gates,loss-by-position,state-by-position,probes}.png "$page/"

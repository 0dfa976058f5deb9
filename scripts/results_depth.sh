#!/usr/bin/env bash
# Everything that docs/results/depth.md reports, about three hours on one idle core: trains, measures, writes
# docs/results/depth/*. Give it a text, and the folder of the public implementation if there is one (recpre/ of
# github.com/seal-rg/recurrent-pretraining); runs that are there already are not trained again.
#     scripts/results_depth.sh tinyshakespeare.txt [recurrent-pretraining/recpre]
set -euo pipefail
text=$(realpath "${1:?give a text file}")
public=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1
undertow=${UNDERTOW:-.venv/bin/undertow}
python=${PYTHON:-.venv/bin/python}
results=docs/results/depth
train() { # recipe, settings...: seed by seed, so that a stopped run goes on where it was
    local name=$1
    shift
    for seed in ${SEEDS:-0 1 2}; do
        [ -d "runs/$name/seed-$seed/model" ] || "$undertow" train "recipes/cpu/$name.yaml" --seeds="[$seed]" "$@"
    done
}

# Loss and accuracy against depth.
for name in depth-s3 depth-s3-fixed; do
    train $name
    for seed in runs/$name/seed-*; do "$undertow" inspect depth "$seed" --examples 256; done
done
for name in depth-text depth-text-fixed; do train $name --task.files="[$text]"; done
"$python" scripts/summarise_depth.py runs/depth-s3 runs/depth-s3-fixed --output $results/s3.json
"$python" scripts/summarise_depth.py runs/depth-text runs/depth-text-fixed --output $results/text.json

# What the iterations do, as figures; exits, caches and drafts.
"$undertow" inspect depth runs/depth-text/seed-0
mkdir -p $results/text $results/s3
cp runs/depth-text/seed-0/depth/*.png $results/text/
cp runs/depth-s3/seed-0/depth/*.png $results/s3/
for seed in runs/depth-text/seed-*; do
    "$python" scripts/measure_depth.py "$seed" --prompt 24 --new 20 --output "$results/text-$(basename "$seed").json"
done
"$python" scripts/measure_exit_widths.py --context 12 --output $results/exit-widths.json
[ -z "$public" ] || "$python" scripts/compare_huginn.py "$public" --output $results/public.json

# A pretrained model looped by retrofit, against the same tokens without the loop.
for name in depth-smollm2-text depth-smollm2-text-plain; do train $name --task.files="[$text]"; done
"$python" scripts/summarise_depth.py runs/depth-smollm2-text runs/depth-smollm2-text-plain --output $results/smollm2.json

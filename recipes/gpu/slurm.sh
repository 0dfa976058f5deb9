#!/usr/bin/env bash
# Train a recipe on eight nodes of eight GPUs: sbatch recipes/gpu/slurm.sh RECIPE [SETTINGS...]
# A job that is stopped or runs out of time saves a checkpoint; submitted again, it goes on from there.
#SBATCH --job-name=undertow
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
set -euo pipefail
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# One launcher a node. They find each other on the first node, at a port that hangs on the job.
exec srun torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-endpoint="$first:$((20000 + SLURM_JOB_ID % 20000))" -m undertow train "$@"

#!/usr/bin/env bash
# Starts train.py on this machine's GPUs (without one: on two processes), and hands its options on.
#
#   ./torchrun.sh --data data.jsonl --out run
#
# torchrun reads PET_NNODES, PET_NPROC_PER_NODE, PET_RDZV_ENDPOINT, ... for the options it is not given. Where they are
# set (slurm.sbatch, jobset.yaml, and the operator of a PyTorchJob set them) this machine is one of several.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
options=()
if [[ -z ${PET_RDZV_ENDPOINT:-} ]]; then
  options+=(--standalone)
fi
if [[ -z ${PET_NPROC_PER_NODE:-} ]]; then
  if command -v nvidia-smi > /dev/null; then
    export PET_NPROC_PER_NODE=gpu
  else
    export PET_NPROC_PER_NODE=2
  fi
fi
export PET_MAX_RESTARTS=${PET_MAX_RESTARTS:-3}
# torchrun hands SIGTERM to the workers, and kills those that are still there after so many seconds (30 if not set)
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-90}
# the workers that torchrun starts again after a failure must not meet in the store of those before them
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# torchrun takes this process's place: it gets the signals
exec torchrun "${options[@]}" "$here/train.py" "$@"

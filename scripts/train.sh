#!/usr/bin/env bash
# Train on this host: all of its GPUs, or two CPU processes. Arguments are Hydra overrides.
#   bash scripts/train.sh
#   bash scripts/train.sh model=gpt_oss_20b parallel=ep8 run.steps=50
set -euo pipefail
source "$(dirname "$0")/env.sh"
gpus=$("$bin/python" -c 'import torch; print(torch.cuda.device_count())')
ranks=$((gpus > 0 ? gpus : 2))
# Mistakes end here, with a line each, and not in the launcher's report.
WORLD_SIZE=$ranks "$bin/python" train.py --check "$@"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$bin/torchrun" --nproc-per-node "$ranks" --rdzv-backend c10d --rdzv-endpoint localhost:0 \
  train.py "$@"

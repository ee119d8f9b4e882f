#!/usr/bin/env bash
# Train on this host: all of its GPUs, or two CPU processes. Arguments are Hydra overrides.
#   bash scripts/train.sh
#   bash scripts/train.sh model=gpt_oss_20b parallel=ep8 run.steps=50
set -euo pipefail
source "$(dirname "$0")/env.sh"
for word in "$@"; do
  case $word in -h | --help | -c | --cfg* | --check) exec "$bin/python" train.py "$@" ;; esac
done
echo "Phalanx: checking command line, data and run folder"
gpus=$("$bin/python" -I parallel/devices.py | wc -l)
ranks=$((gpus > 0 ? gpus : 2))
# Mistakes end here, with a line each, and not in the launcher's report.
WORLD_SIZE=$ranks "$bin/python" train.py --check "$@"
if [ "$gpus" -gt 0 ]; then where="one for each GPU"; else where="on the CPU, as there is no GPU"; fi
echo "Phalanx: torchrun starts $ranks ranks, $where"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$bin/torchrun" --standalone --nproc-per-node "$ranks" train.py "$@"

#!/usr/bin/env bash
# The commands of docs/proof/long_context.md, with a limit for each: training on GPUS GPUs (default 2), both checkpoints
# measured, tables and picture drawn. data/corpus has the corpus. What it leaves is in FOLDER, the run in runs/.
#   GPUS=2 TRAIN_SECONDS=310 MEASURE_SECONDS=80 bash scripts/lab/proof/long_context.sh FOLDER [OVERRIDE ...]
# Past TRAIN_SECONDS the run saves and ends, and its newest checkpoint is that after the long phase.
set -u
cd "$(dirname "$0")/../../.."
out=$(realpath -m "${1:?FOLDER}"); shift
gpus=${GPUS:-2} run=runs/proof_moe_32k
mkdir -p "$out"

timeout -s TERM -k 25 "${TRAIN_SECONDS:-310}" torchrun --standalone --nproc-per-node "$gpus" train.py \
  experiment=proof_moe_32k parallel.expert=1 data.micro_batch=16 "$@" > "$out/train.log" 2>&1
echo "training ended with $?"; tail -n 30 "$out/train.log"

measure() {  # GPU STEP NAME
  CUDA_VISIBLE_DEVICES=$1 timeout "${MEASURE_SECONDS:-80}" python scripts/lab/proof/long_context.py $run \
    data/corpus/held_out/long --context 32768 --step "$2" --no-verify --json "$out/$3.json" > "$out/$3.log" 2>&1 ||
    tail -n 30 "$out/$3.log"
}
steps=($(ls $run/checkpoints | sed -n 's/^step_0*\([0-9]*\)$/\1/p' | sort -n))
[ ${#steps[@]} -ge 2 ] || { echo "two checkpoints are needed, there are: ${steps[*]:-none}"; exit 1; }
measure 0 "${steps[0]}" before &
measure $((gpus > 1)) "${steps[-1]}" after &
wait
cp $run/metrics.jsonl "$out/"
python scripts/lab/proof/plot_long_context.py "$out/before.json" "$out/after.json" --plot "$out/long_context.png"

#!/usr/bin/env bash
# Attention of Qwen3-30B-A3B whose sequences two H200s share, from the root of a checkout:
#   bash scripts/lab/two_gpus/context.sh            32K and 128K tokens: keys, heads, ring, and Transformer Engine's if installed (~90 s)
#   bash scripts/lab/two_gpus/context.sh documents  the same with packed documents: keys by flex, heads by fa4 (~110 s)
#   bash scripts/lab/two_gpus/context.sh train      losses of 6 layers at 32K, documents apart: two GPUs (heads), and one (~100 s)
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PYTHONPATH"
T=${OUT:-/tmp/context}; R=${R:-/tmp/context_runs}; mkdir -p $T $R; began=$(date +%s); what=${1:-ways}
bench() { # NAME SECONDS arguments...
  n=$1 lim=$2; shift 2; t=$(date +%s)
  timeout -s KILL $lim python -m torch.distributed.run --standalone --nproc-per-node 2 -m phalanx.scripts.lab.context.bench "$@" \
    > $T/$n.txt 2> $T/$n.log; rc=$?
  cat $T/$n.txt; echo "$n rc $rc, $(( $(date +%s) - t )) s"; [ $rc = 0 ] || grep -iE "error|assert|memory" $T/$n.log | tail -5 | cut -c1-400
}
run() { # RANKS NAME overrides...
  ranks=$1; n=$2; shift 2; t=$(date +%s)
  timeout -s KILL 70 python -m torch.distributed.run --standalone --nproc-per-node $ranks train.py experiment=qwen3_30b_8gpu run=bench \
    model.layers=6 data.sequence_length=32768 data.global_batch=2 data.document_mask=true parallel.expert=0 optim.moments=bf16 \
    run.steps=8 run.log_interval=1 run.dir=$R run.name=$n "$@" > $T/$n.log 2>&1; rc=$?
  echo "$n rc $rc, $(( $(date +%s) - t )) s"; [ $rc = 0 ] || grep -iE "error|assert|memory" $T/$n.log | tail -5 | cut -c1-400
  python - $R/$n/metrics.jsonl <<'P'
import json, statistics as s, sys
try:
    r = {x["step"]: x for x in map(json.loads, open(sys.argv[1])) if "step_time" in x and "step" in x}
    last = [r[k]["step_time"] for k in sorted(r)][-4:]
    print(f"  median step {s.median(last):.3f} s of {[round(x, 3) for x in last]}, {max(x.get('memory', 0) for x in r.values()):.1f} GiB,"
          f" losses {[round(r[k]['loss'], 4) for k in sorted(r)]}")
except Exception as e:
    print("  FAILED", repr(e))
P
}
case $what in
  ways) bench ways 150 ;;
  documents) bench documents 190 --documents --lengths 32768 131072 --calls 3 ;;
  train)
    run 2 heads parallel.context=2
    run 1 one ;;
esac
echo "== took $(( $(date +%s) - began )) s"

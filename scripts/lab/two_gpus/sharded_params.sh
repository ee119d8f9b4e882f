#!/usr/bin/env bash
# Sharded parameters (zero3) on two H200s, from the root of a checkout:  bash scripts/lab/two_gpus/sharded_params.sh [small|big|ep2|tests]
# 1. losses of 10 captured steps with validations between, sharded, unsharded, and sharded eagerly;
# 2. 8 layers of Moonlight, all experts on each rank: median step times, peak memory and the dry run's;
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PYTHONPATH"
T=${OUT:-/tmp/zero3}; R=${R:-/tmp/zero3_runs}; mkdir -p $T $R; began=$(date +%s); what=${1:-all}
Z=parallel.distributed_optimizer=zero3
if [ $what = tests ]; then
  python -m pytest -q -n 0 -m gpu tests/extras/sharded_params/test_sharded_gpu.py 2>&1 | tail -40; exit
fi
small() { # NAME overrides...
  n=$1; shift
  timeout -s KILL ${LIMIT:-120} python -m torch.distributed.run --standalone --nproc-per-node 2 train.py model=tiny_deepseek data=synthetic \
    model.layers=5 model.hidden=512 model.moe.ffn=512 model.mtp_layers=1 kernels=fused parallel.expert=1 run.steps=10 \
    data.sequence_length=256 data.micro_batch=2 optim.warmup_steps=0 optim.lr=2e-4 optim.decay_steps=10 run.save_interval=-1 run.resume=never \
    run.eval_interval=3 run.eval_batches=1 parallel.capacity_factor=8 run.log_interval=1 run.device=cuda run.dir=$R run.name=$n "$@" \
    > $T/$n.log 2>&1 || { echo "$n rc $?"; grep -iE "error|assert" $T/$n.log | tail -5 | cut -c1-400; }
}
if [ $what = all ] || [ $what = small ]; then
echo "== 1. equality"
G=run.graph=full_iteration; ONE=data.global_batch=4; TWO=data.global_batch=8
small whole $ONE $G                       # compiles; the others find its kernels
S="run.save_interval=5 run.resume=auto run.async_save=on"
small zero3 $ONE $G $Z & small eager $ONE run.graph=off $Z & small saved $ONE $G $Z $S run.steps=5 & wait
# of two micro-batches sums have another order: close, not equal
small whole_two $TWO $G & small zero3_two $TWO $G $Z & small saved $ONE $G $S & wait   # resumed, unsharded
python - $R <<'P'
import json, sys
def read(n):
    rows = [json.loads(x) for x in open(f"{sys.argv[1]}/{n}/metrics.jsonl")]
    return [r["loss"] for r in rows if "grad_norm" in r], [r["valid_loss"] for r in rows if "valid_loss" in r]
for a, b in (("zero3", "whole"), ("zero3", "eager"), ("zero3_two", "whole_two")):
    try:
        (x, v), (y, w) = read(a), read(b)
        print(a, b, "EQUAL" if (x, v) == (y, w) and len(x) == 10 else "DIFFERENT", len(x), len(y),
              "largest difference", max(abs(p - q) for p, q in zip(x + v, y + w)), "losses", x[0], x[-1], y[-1])
    except Exception as e:
        print(a, b, "FAILED", repr(e))
try:
    x, y = read("saved")[0], read("whole")[0]
    print("saved sharded, resumed unsharded:", "EQUAL" if x == y and len(x) == 10 else "DIFFERENT", len(x), x[-5:], y[-5:])
except Exception as e:
    print("saved FAILED", repr(e))
P
grep -h "could not be captured\|^  graph" $T/zero3.log | head -3
echo "== 1 took $(( $(date +%s) - began )) s"
fi
B="experiment=moonlight_8gpu run=bench model.layers=8 data.micro_batch=4 data.global_batch=16 optim.moments=bf16 model.moe.router.force_balance=true run.steps=20 run.log_interval=1"
big() { # NAME overrides...
  n=$1; shift; t=$(date +%s)
  CUDA_VISIBLE_DEVICES= python train.py $B parallel.world_size=2 run.dry_run=true run.machine=h200 kernels=fused run.device=auto "$@" > $T/$n.dry 2>&1 &
  timeout -s KILL 90 python -m torch.distributed.run --standalone --nproc-per-node 2 train.py $B run.dir=$R run.name=$n "$@" > $T/$n.log 2>&1; rc=$?
  echo "$n rc $rc, $(( $(date +%s) - t )) s"; [ $rc = 0 ] || grep -iE "error|memory" $T/$n.log | tail -4 | cut -c1-400
  wait; grep -hE "stage   .*peak|0 only|^  step |^  graph" $T/$n.dry | cut -c1-140
  python - $R/$n/metrics.jsonl <<'P'
import json, statistics as s, sys
try:
    r = {x["step"]: x for x in map(json.loads, open(sys.argv[1])) if "step_time" in x and "step" in x}
    last = [r[k]["step_time"] for k in sorted(r)][-14:]
    print(f"  measured: median step {s.median(last):.4f} s of {[round(x, 4) for x in last]}, peak {max(x.get('memory', 0) for x in r.values()):.2f} GiB, loss {r[max(r)]['loss']:.5f}")
except Exception as e:
    print("  FAILED", repr(e))
P
}
if [ $what = all ] || [ $what = big ]; then
echo "== 2. Moonlight, 8 layers"
for i in 1 2; do
big moonlight_whole_$i parallel.expert=1
big moonlight_zero3_$i parallel.expert=1 $Z
done
fi
if [ $what = ep2 ]; then  # experts on one rank each: dense layers alone are sharded
big moonlight_whole_ep2 parallel.expert=2
big moonlight_zero3_ep2 parallel.expert=2 $Z
fi
echo "== took $(( $(date +%s) - began )) s"

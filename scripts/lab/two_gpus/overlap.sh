#!/usr/bin/env bash
# Micro-batches beside each other, and stages, on two H200s; from the root of a checkout:
#   bash scripts/lab/two_gpus/overlap.sh bits      losses and norms of passes beside each other, offloaded and in FP8, bit for bit (~150 s)
#   bash scripts/lab/two_gpus/overlap.sh exposed   exposed part of exchanges over the paced wire: 8 SMs, 4 SMs, 8 SMs without a margin (~190 s)
#   bash scripts/lab/two_gpus/overlap.sh stages    8 layers of Moonlight: no stages, two stages, two chunks a stage (~150 s)
#   bash scripts/lab/two_gpus/overlap.sh           bits of three cases and exposed with 8 and 4 SMs (~200 s)
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PYTHONPATH"
T=${OUT:-/tmp/beside}; R=${R:-/tmp/beside_runs}; mkdir -p $T $R; began=$(date +%s); what=${1:-all}
cat > /tmp/drive_beside.py <<'P'
"""train.py with other SMs of collectives (CTAS), and another margin of the experts' kernels (MARGIN)."""
import os, runpy, sys
sys.path.insert(0, os.getcwd())
from phalanx.parallel.megatron.imports import importing_megatron
with importing_megatron():
    from phalanx.extras.overlap import passes
    from phalanx.moe.plan import resolve
if ctas := os.environ.get("CTAS"):
    passes.EXCHANGE_SMS = int(ctas)
if (margin := os.environ.get("MARGIN")) is not None:
    margins = resolve._margins
    def changed(draft):
        found = margins(draft)
        return type(found)(*[int(margin)] * 3)
    resolve._margins = changed
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
P
run() { # RANKS NAME overrides...
  ranks=$1; n=$2; shift 2; t=$(date +%s)
  timeout -s KILL ${LIMIT:-110} python -m torch.distributed.run --standalone --nproc-per-node $ranks /tmp/drive_beside.py \
    run.dir=$R run.name=$n run.resume=never run.save_interval=-1 run.log_interval=1 "$@" > $T/$n.log 2>&1; rc=$?
  echo "$n rc $rc, $(( $(date +%s) - t )) s"
  [ $rc = 0 ] || grep -iE "error|assert|memory" $T/$n.log | tail -5 | cut -c1-400
}
told() { # NAME: median seconds of the last four steps
  python - $R/$1/metrics.jsonl $1 <<'P'
import json, statistics as s, sys
try:
    r = {x["step"]: x for x in map(json.loads, open(sys.argv[1])) if "step_time" in x and "step" in x}
    last = [r[k] for k in sorted(r)][-4:]
    times = [x["step_time"] for x in last]
    print(f"  {sys.argv[2]}: median {s.median(times):.4f} s of {[round(x, 4) for x in times]}, "
          f"{s.median(x['tokens_per_second_per_gpu'] for x in last):,.0f} tokens/s/GPU, "
          f"{max(x.get('memory', 0) for x in r.values()):.1f} GiB, loss {last[-1]['loss']:.5f}")
except Exception as e:
    print("  FAILED", repr(e))
P
}
same() { # NAME NAME
  python - $R $1 $2 <<'P'
import json, sys
def read(n):
    rows = [json.loads(x) for x in open(f"{sys.argv[1]}/{n}/metrics.jsonl")]
    return [(r["loss"], r["grad_norm"]) for r in rows if "grad_norm" in r]
try:
    a, b = map(read, sys.argv[2:])
    print(" ", sys.argv[2], sys.argv[3], "EQUAL" if a == b and len(a) == 10 else "DIFFERENT", len(a), len(b), a[-1], b[-1])
except Exception as e:
    print("  FAILED", repr(e))
P
}
S="model=tiny_deepseek data=synthetic model.layers=4 model.hidden=512 model.moe.ffn=256 kernels=fused run.steps=10 \
data.sequence_length=256 data.micro_batch=2 data.global_batch=16 optim.warmup_steps=0 optim.lr=5e-4 run.eval_interval=0 \
run.device=cuda run.graph=full_iteration parallel.delay_wgrad=on"
pair() { # NAME overrides...
  n=$1; shift
  run 2 ${n}_off $S "$@" parallel.overlap_microbatches=off & run 2 ${n}_on $S "$@" parallel.overlap_microbatches=on & wait
  same ${n}_off ${n}_on
}
OFFLOAD="run.recompute=[norm] run.offload=[residual,attention,expert_h]"
if [ $what = all ] || [ $what = bits ]; then
echo "== bits: 10 captured steps"
export PHALANX_NODE_GPUS=1
pair offload_hier parallel.expert=2 parallel.dispatch=hier $OFFLOAD
unset PHALANX_NODE_GPUS
pair fp8_symm precision=fp8_block parallel.expert=2 parallel.dispatch=symm parallel.comm_sms=0
pair tensor parallel.tensor=2 parallel.expert=2 parallel.dispatch=alltoall
fi
if [ $what = bits ]; then
pair offload_stages parallel.expert=1 parallel.pipeline=2 parallel.virtual_pipeline=2 $OFFLOAD
pair offload_fp8_symm precision=fp8_block parallel.expert=2 parallel.dispatch=symm $OFFLOAD
run 2 fp8_keep $S precision=fp8_block parallel.expert=2 parallel.dispatch=symm parallel.comm_sms=0 parallel.save_x=keep parallel.overlap_microbatches=off
same fp8_symm_off fp8_keep
fi
V="model=deepseek_v3 model.layers=3 model.moe.dense_layers=0 model.mtp_layers=0 model.vocab_size=32768 \
model.moe.router.groups=1 model.moe.router.group_topk=1 model.moe.router.force_balance=true data=synthetic \
data.sequence_length=4096 data.micro_batch=1 optim.moments=bf16 run=bench run.steps=7"
if [ $what = all ] || [ $what = exposed ]; then
echo "== exposed: DeepSeek-V3, 3 layers, 32 micro-batches, over a wire of 50 GB/s"
CUDA_VISIBLE_DEVICES=0 run 1 none $V model.moe.experts=16 parallel.expert=1 data.global_batch=32; told none
export PHALANX_NODE_GPUS=1 PHALANX_WIRE=50e9,20e-6
W="$V model.moe.experts=32 parallel.expert=2 parallel.dispatch=hier data.global_batch=64"
run 2 on8 $W parallel.overlap_microbatches=on; told on8
CTAS=4 run 2 on4 $W parallel.overlap_microbatches=on; told on4
[ $what = exposed ] && { MARGIN=0 run 2 on8_no_margin $W parallel.overlap_microbatches=on; told on8_no_margin; }
unset PHALANX_NODE_GPUS PHALANX_WIRE
echo "exposed part = (ms a micro-batch - those of none) / 16.1; before: 0.24 on two H100s"
python - $R <<'P'
import json, statistics as s, sys
def ms(n):
    r = [json.loads(x) for x in open(f"{sys.argv[1]}/{n}/metrics.jsonl")]
    return 1e3 * s.median([x["step_time"] for x in r if "step_time" in x and "step" in x][-4:]) / 32
for n in ("on8", "on4", "on8_no_margin"):
    try:
        print(f"  {n}: {ms('none'):.2f} -> {ms(n):.2f} ms, exposed {(ms(n) - ms('none')) / 16.1:.3f}")
    except Exception as e:
        print(" ", n, "none", repr(e)[:80])
P
fi
if [ $what = stages ]; then
echo "== stages: 8 layers of Moonlight"
M="experiment=moonlight_8gpu run=bench model.layers=8 data.micro_batch=1 data.global_batch=32 optim.moments=bf16 \
model.moe.router.force_balance=true run.steps=8 parallel.expert=1"
run 2 whole $M parallel.expert=2; told whole
run 2 two_stages $M parallel.pipeline=2; told two_stages
run 2 two_chunks $M parallel.pipeline=2 parallel.virtual_pipeline=2; told two_chunks
fi
echo "== took $(( $(date +%s) - began )) s"

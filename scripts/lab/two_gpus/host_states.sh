#!/usr/bin/env bash
# States of the optimizer in host memory on two H200s, from the root of a checkout:  bash scripts/lab/two_gpus/host_states.sh [small|big]
# 1. losses and norms of 10 captured steps, states on the GPU and on the host, bit for bit;
# 2. six layers of GPT-OSS-120B, 128 experts, 1 M tokens a step: steps with an update, then without.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
export PYTHONPATH="$PWD:$PYTHONPATH"
T=${OUT:-/tmp/host_states}; R=${R:-/tmp/host_states_runs}; mkdir -p $T $R; began=$(date +%s); what=${1:-all}
cat > /tmp/drive.py <<'P'
"""train.py with the extra's sizes changed by the environment, and updates left out after a step."""
import os, runpy, sys, time
sys.path.insert(0, os.getcwd())
from phalanx.parallel.megatron.imports import importing_megatron
with importing_megatron():
    from phalanx.extras.host_states import entry, optimizer
    from phalanx.parallel.engine import Engine
if few := os.environ.get("ELEMENTS"):
    optimizer.ELEMENTS = int(few)
if (room := os.environ.get("ROOM")) is not None:
    place = entry.placement
    entry.placement = lambda *given: place(*given)._replace(room=int(room))
zeros, init = optimizer.zeros, optimizer.Stream.__init__
def timed(size, *given, **named):
    t = time.time(); out = zeros(size, *given, **named)
    print(f"host memory: {size / 2**30:.2f} GiB pinned in {time.time() - t:.1f} s", flush=True)
    return out
def told(self, jobs, *given):
    init(self, jobs, *given)
    print(f"stream: {len(jobs)} jobs, {sum(j.size for j in jobs) / 2**30:.2f} GiB, on the GPU "
          f"{self.device_bytes / 2**30:.2f} GiB, {sum(j.stays for j in jobs)} jobs stay", flush=True)
optimizer.zeros, optimizer.Stream.__init__ = timed, told
last, calls, step = int(os.environ.get("LAST_UPDATE", "0")), [0], Engine.step
def stepped(self, norm=None, run=None):
    calls[0] += 1
    if last and calls[0] > last:
        self.skip()
        return norm
    return step(self, norm, run)
Engine.step = stepped
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
P
small() { # NAME GPU overrides...
  n=$1 g=$2; shift 2
  CUDA_VISIBLE_DEVICES=$g ELEMENTS=50000 ROOM=0 timeout -s KILL ${LIMIT:-150} python /tmp/drive.py model=tiny_gpt_oss data=synthetic run.steps=10 \
    data.sequence_length=256 data.micro_batch=2 data.global_batch=8 optim.warmup_steps=0 run.save_interval=-1 run.resume=never \
    run.graph=full_iteration run.log_interval=1 run.device=cuda run.dir=$R run.name=$n "$@" > $T/$n.log 2>&1 || { echo "$n rc $?"; tail -5 $T/$n.log; }
}
if [ $what != big ]; then
echo "== 1. equality, captured"
i=0
for kind in adamw muon; do for m in fp32 bf16; do for h in "" _host; do
  small ${kind}_$m$h $((i % 2)) optim=$kind optim.moments=$m$h & i=$((i + 1))
done; done; done; wait
python - $R <<'P'
import json, sys
for kind in ("adamw", "muon"):
    for m in ("fp32", "bf16"):
        try:
            a, b = ([(x["loss"], x["grad_norm"]) for x in map(json.loads, open(f"{sys.argv[1]}/{kind}_{m}{h}/metrics.jsonl")) if "grad_norm" in x] for h in ("", "_host"))
            print(kind, m, "EQUAL" if a == b and len(a) == 10 else "DIFFERENT", len(a), len(b), "losses", a[0][0], a[-1][0], b[-1][0])
        except Exception as e:
            print(kind, m, "FAILED", e)
P
grep -h "jobs stay\|graph  \|could not be captured" $T/*_host.log | sort | uniq -c | head
echo "== 1 took $(( $(date +%s) - began )) s"
fi
big() { # NAME SECONDS overrides...
  n=$1 lim=$2; shift 2; t=$(date +%s)
  LAST_UPDATE=6 timeout -s KILL $lim python -m torch.distributed.run --standalone --nproc-per-node 2 /tmp/drive.py experiment=gpt_oss_120b_64gpu run=bench \
    model.layers=6 parallel.expert=2 parallel.pipeline=1 parallel.virtual_pipeline=1 data.global_batch=256 data.micro_batch=4 \
    model.moe.router.force_balance=true run.steps=10 run.log_interval=1 run.dir=$R run.name=$n "$@" > $T/$n.log 2>&1; rc=$?
  echo "$n rc $rc, $(( $(date +%s) - t )) s"; grep -h "jobs stay\|pinned in\|^  states\|stay on\|^  graph" $T/$n.log | sort | uniq | head
  [ $rc = 0 ] || grep -iE "error|memory" $T/$n.log | tail -4 | cut -c1-400
  python - $R/$n/metrics.jsonl <<'P'
import json, statistics as s, sys
try:
    r = {x["step"]: x for x in map(json.loads, open(sys.argv[1])) if "step_time" in x and "step" in x}
    print("seconds by step", {k: round(x["step_time"], 3) for k, x in r.items()}, "GiB", max(x.get("memory", 0) for x in r.values()))
    on, off = (s.median(r[k]["step_time"] for k in ks if k in r) for ks in ((5, 6, 7), (8, 9, 10)))
    print(f"with an update {on:.3f} s (steps 5, 6, 7), without {off:.3f} s (8, 9, 10): {on / off - 1:+.1%}")
except Exception as e:
    print("no metrics:", e)
P
}
if [ $what != small ]; then
echo "== 2. six layers of GPT-OSS-120B"; free -g | head -2; nproc
big host 170 optim.moments=bf16_host
if [ -n "$MORE" ]; then # 3. all states travel; fp32 states, 229 GiB of host memory
  ROOM=0 big host_all 170 optim.moments=bf16_host
  big host_fp32 250 optim.moments=fp32_host
fi
fi
echo "== all took $(( $(date +%s) - began )) s"

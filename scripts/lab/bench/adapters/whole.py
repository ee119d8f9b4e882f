"""Training steps of whole models of transformers: as they are, and after `apply`, on one GPU.

    python -m phalanx.scripts.lab.bench.adapters.whole [SIZE ...] [--rounds N] [--liger] [--profile]

  qwen3_30b    4 layers of Qwen3-30B-A3B, 8,192 tokens in sequences of 4,096
  qwen3_small  8 layers of 1536 channels, 96 experts of 648, 6 a token
  gpt_oss      4 layers of 1920 channels, 24 experts of 1472, 3 a token; sequences of 2,048
  deepseek_v3  3 layers of 2560 channels, 40 experts of 1088, 5 a token

A step is forward and backward of the language model's loss in bf16, without the optimizer. Sides
share parameters, have gradients of their own and are timed in turns, two steps at once:
transformers with its `grouped_mm` experts, with this project's, after `apply`, after `apply` in a
CUDA graph, and with `--liger` Liger's kernels. Memory is the peak of a step with parameters and
gradients. Bars are of the time of `grouped_mm` over that of a side. `--profile` prints the kernels
that take most of the time of an applied step of the first size.
"""

import argparse
import contextlib
import copy
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from phalanx.adapters.transformers import NAME, apply
from phalanx.adapters.transformers.trainer import plain_positions, record
from phalanx.scripts.lab.bench.timing import reason

BASE = "grouped_mm"
LIGER = "liger"
SIDES = (BASE, "phalanx experts", "apply", "apply, captured")
_STEPS = 2  # of a measurement: the host may run ahead of the GPU
_HEAD = (
    "| size | side | ms | tokens/s | times grouped_mm | bar | peak GiB | loss or note |\n"
    "|---|---|---:|---:|---:|---:|---:|---|"
)


@dataclass(frozen=True)
class Size:
    """A model, the shape of its batch, and bars of `apply` and of captured steps."""

    kind: Any
    config: Any
    batch: tuple[int, int]
    bars: tuple[float, float] = (1.35, 1.35)


def sizes() -> dict[str, Size]:
    qwen3 = dict(num_key_value_heads=4, head_dim=128, norm_topk_prob=True)
    return {
        "qwen3_30b": Size(
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **qwen3,
                vocab_size=151936,
                num_hidden_layers=4,
                hidden_size=2048,
                num_attention_heads=32,
                num_experts=128,
                num_experts_per_tok=8,
                moe_intermediate_size=768,
            ),
            (2, 4096),
            (1.5, 1.8),
        ),
        "qwen3_small": Size(
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(
                **qwen3,
                vocab_size=65536,
                num_hidden_layers=8,
                hidden_size=1536,
                num_attention_heads=16,
                num_experts=96,
                num_experts_per_tok=6,
                moe_intermediate_size=648,
            ),
            (2, 4096),
        ),
        "gpt_oss": Size(
            GptOssForCausalLM,
            GptOssConfig(
                vocab_size=65536,
                num_hidden_layers=4,
                hidden_size=1920,
                num_attention_heads=32,
                num_key_value_heads=4,
                head_dim=64,
                num_local_experts=24,
                num_experts_per_tok=3,
                intermediate_size=1472,
            ),
            (4, 2048),
        ),
        "deepseek_v3": Size(
            DeepseekV3ForCausalLM,
            DeepseekV3Config(
                vocab_size=65536,
                num_hidden_layers=3,
                first_k_dense_replace=0,
                hidden_size=2560,
                intermediate_size=4352,
                num_attention_heads=20,
                num_key_value_heads=20,
                q_lora_rank=1024,
                kv_lora_rank=512,
                qk_nope_head_dim=128,
                qk_rope_head_dim=64,
                v_head_dim=128,
                n_routed_experts=40,
                num_experts_per_tok=5,
                moe_intermediate_size=1088,
                n_shared_experts=1,
                n_group=1,
                topk_group=1,
            ),
            (2, 4096),
        ),
    }


def tiny() -> dict[str, Size]:
    """One small model, for a CPU."""
    config = Qwen3MoeConfig(
        vocab_size=128,
        num_hidden_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    )
    return {"tiny": Size(Qwen3MoeForCausalLM, config, (2, 16))}


class Side:
    """A model with its kernels, and what these replaced in the file of its class."""

    def __init__(
        self, name: str, size: Size, first: nn.Module | None, device: torch.device
    ) -> None:
        self.name, self.file = name, vars(sys.modules[size.kind.__module__])
        before = dict(self.file)
        try:
            self.model = _model(size, first, device)
            _prepared(name, self.model)
        finally:
            changed = {k: v for k, v in self.file.items() if before.get(k) is not v}
            self.file.update(before)
        self.own, self.before = changed, {key: before.get(key) for key in changed}
        shape = size.batch
        self.ids = torch.randint(
            0, size.config.vocab_size, shape, generator=torch.Generator().manual_seed(0)
        ).to(device)
        self.run: Callable[[], Tensor] = self.step
        self.peak = self.measured(self.run, keep=False)
        if name.endswith("captured"):
            self.graph: Any = None
            self.peak = self.measured(self.captured, keep=True)

    def step(self) -> Tensor:
        """Loss of a forward and backward pass, which writes gradients."""
        self.file.update(self.own)
        try:
            for p in self.model.parameters():
                p.grad = None
            captured = self.name.endswith("captured")
            with plain_positions() if captured else contextlib.nullcontext():
                loss: Tensor = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            loss.backward()
            return loss.detach()
        finally:
            self.file.update(self.before)

    def captured(self) -> Tensor:
        """Make the step a CUDA graph, and replay it from now on."""
        if self.ids.device.type != "cuda":
            raise ValueError("CUDA graphs need a GPU")
        for p in self.model.parameters():
            p.grad = None
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.step()
        torch.cuda.current_stream().wait_stream(stream)
        for p in self.model.parameters():
            p.grad = None
        self.graph, loss = record(self.step, None, stream)

        def replay() -> Tensor:
            self.graph.replay()
            return loss

        self.run = replay
        return replay()

    def measured(self, run: Callable[[], Tensor], *, keep: bool) -> float:
        """Peak GiB of a call with the parameters, after one that compiles what it needs."""
        if not keep:
            run()
            self.drop()
        if self.ids.device.type != "cuda":
            self.loss = run().item()
            return 0.0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.loss = run().item()
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        peak = torch.cuda.max_memory_allocated() - before + weights
        if not keep:
            self.drop()
        return peak / 2**30

    def drop(self) -> None:
        for p in self.model.parameters():
            p.grad = None

    def ms(self) -> float:
        """Milliseconds of a step; gradients of eager steps are freed behind it."""
        if self.ids.device.type != "cuda":
            begin = time.perf_counter()
            self.run()
            return 1000 * (time.perf_counter() - begin)
        torch.cuda.synchronize()
        begin_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin_event.record()
        for _ in range(_STEPS):
            self.run()
        end_event.record()
        torch.cuda.synchronize()
        if self.run == self.step:
            self.drop()
        return begin_event.elapsed_time(end_event) / _STEPS


def _model(size: Size, first: nn.Module | None, device: torch.device) -> Any:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    with torch.device(device if first is None else "meta"):
        model = size.kind._from_config(
            copy.deepcopy(size.config), dtype=dtype, experts_implementation=BASE
        ).train()
    if first is not None:
        buffers = dict(first.named_buffers())
        for name, _ in [*model.named_parameters(), *model.named_buffers()]:
            path, _, leaf = name.rpartition(".")
            owner, source = model.get_submodule(path), first.get_submodule(path)
            if name in buffers:
                owner._buffers[leaf] = source.get_buffer(leaf).clone()
            else:
                owner._parameters[leaf] = nn.Parameter(source.get_parameter(leaf).data)
    return model


def _prepared(name: str, model: Any) -> None:
    if name == "phalanx experts":
        model.set_experts_implementation(NAME)
    elif name.startswith("apply"):
        print(apply(model), file=sys.stderr, flush=True)
    elif name == LIGER:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)


def rows(
    name: str, size: Size, device: torch.device, rounds: int, *, liger: bool = False
) -> Iterator[str]:
    """Rows of the table of a size; a side that cannot run has its error there."""
    sides: dict[str, Side] = {}
    # Liger's first step has taken minutes: it comes behind the others, beside the base alone.
    for group in (SIDES, (LIGER,)) if liger else (SIDES,):
        notes: dict[str, str] = {}
        for side in group:
            first = sides[BASE].model if BASE in sides else None
            begin = time.monotonic()
            try:
                sides[side] = Side(side, size, first, device)
            except Exception as error:
                notes[side] = reason(error).replace("|", "/")
            seconds = time.monotonic() - begin
            print(f"{name}, {side}: ready in {seconds:.1f} s", file=sys.stderr, flush=True)
        times = _times(sides, notes, rounds)
        base = median(times[BASE]) if times.get(BASE) else None
        for side in group:
            if side in notes:
                yield f"| {name} | {side} | | | | | | {notes[side]} |"
                continue
            ms = median(times[side])
            ratio = "" if base is None else f"{base / ms:.2f}"
            bar = dict(zip(("apply", "apply, captured"), size.bars, strict=True)).get(side)
            rate = f"{size.batch[0] * size.batch[1] / ms * 1000:,.0f}"
            yield (
                f"| {name} | {side} | {ms:.2f} | {rate} | {ratio} | {bar or ''} | "
                f"{sides[side].peak:.1f} | loss {sides[side].loss:.4f} |"
            )
        sides = {side: sides[side] for side in sides if side == BASE}


def _times(sides: dict[str, Side], notes: dict[str, str], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of sides in turns; one that fails leaves `sides` and has a note."""
    times: dict[str, list[float]] = {side: [] for side in sides}
    for counted in range(-2, rounds):
        for side in list(sides):
            try:
                ms = sides[side].ms()
            except Exception as error:
                notes[side] = reason(error).replace("|", "/")
                del sides[side]
                continue
            if counted >= 0:
                times[side].append(ms)
    return times


def profile(size: Size, device: torch.device) -> str:
    """The 15 kernels that take most of the time of an applied step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    side = Side("apply", size, None, device)
    side.step()
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities = [ProfilerActivity.CUDA]
        torch.cuda.synchronize()
    with profiled(activities=activities) as profiler:
        side.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    key = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=80)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sizes", nargs="*", metavar="SIZE", help="default: all")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: %(default)s")
    parser.add_argument("--liger", action="store_true", help="time Liger's kernels too")
    parser.add_argument("--seconds", type=int, default=270, help="start no size after these")
    parser.add_argument("--profile", action="store_true", help="kernels of an applied step")
    parser.add_argument("--tiny", action="store_true", help="a tiny model in fp32, on a CPU too")
    args = parser.parse_args(argv)
    known = tiny() if args.tiny else sizes()
    if unknown := [name for name in args.sizes if name not in known]:
        parser.error(f"{unknown[0]}: a size is one of {', '.join(known)}")
    if not (torch.cuda.is_available() or args.tiny):
        print("this program measures on a CUDA device, and there is none", file=sys.stderr)
        return 1
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    begin, chosen = time.monotonic(), args.sizes or list(known)
    print(_HEAD, flush=True)
    for name in chosen:
        if time.monotonic() - begin > args.seconds:
            print(f"| {name} | | | | | | | not started after {args.seconds} s |", flush=True)
            continue
        try:
            for row in rows(name, known[name], device, args.rounds, liger=args.liger):
                print(row, flush=True)
        except Exception as error:
            print(f"| {name} | | | | | | | {reason(error)} |", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if args.profile:
        try:
            print(profile(known[chosen[0]], device), flush=True)
        except Exception as error:
            print(f"profile: {reason(error)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

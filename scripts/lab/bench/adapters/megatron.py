"""Layers of Megatron-Core with its own experts and with ours, on the ranks of one host.

    torchrun --standalone --nproc-per-node 2 -m phalanx.scripts.lab.bench.adapters.megatron
    [--rounds N]

4 layers of Qwen3-30B-A3B and a small vocabulary, 8,192 tokens a rank in bf16, experts over all
ranks: `symm_spec` against TEGroupedMLP with all-to-all (without Transformer Engine: sequential
experts) and against `spec`. Times are those of the slowest rank, forward and backward. Weights are
drawn for each, so that the last column says nothing.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from phalanx.parallel.connections import Connections
from phalanx.scripts.lab.bench.adapters.compared import HEAD, OURS, Comparison
from phalanx.scripts.lab.bench.clocks import Cpu, Gpu
from phalanx.scripts.lab.bench.timing import Bench


def run(rounds: int, *, tiny: bool) -> bool:
    """Print the table on the first rank; true if ours was timed."""
    cuda = torch.cuda.is_available()
    if not cuda:
        from phalanx.parallel.megatron import cpu

        cpu.install()
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from phalanx.adapters import megatron

    parallel_state.initialize_model_parallel(expert_model_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(1)
    config = _config(tiny=tiny)
    clock = Gpu(Connections()) if cuda else Cpu()
    shape = (2, 16) if tiny else (2, 4096)
    ids = torch.randint(0, 128, shape, device=clock.device)
    compared = Comparison(Bench(clock, rounds), "megatron", ids.numel())
    positions = torch.arange(shape[1], device=clock.device).expand(shape)
    for side, spec in (
        (OURS, megatron.symm_spec),
        (f"{OURS}, experts alone", megatron.spec),
        (f"megatron, {_experts_of(config)}", _stock_spec(config)),
    ):
        model = GPTModel(config, spec, vocab_size=128, max_sequence_length=shape[1])
        model = model.to(clock.device, config.params_dtype)

        def forward(model: Any = model, symm: bool = side == OURS) -> torch.Tensor:
            if symm:  # its buffers, in the order of a step
                for group in megatron.groups():
                    group.begin()
            loss: torch.Tensor = model(ids, positions, None, labels=ids).float().mean()
            return loss

        leaves = [p for p in model.parameters() if p.requires_grad]
        # Megatron-Core's dispatcher reads counts of tokens on the host.
        compared.add(side, forward, leaves, captured=side == OURS)
    compared.run()
    if dist.get_rank() == 0:
        print(HEAD, *compared.rows(), sep="\n", flush=True)
    return compared.ours_ran


def _config(*, tiny: bool) -> Any:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.transformer.transformer_config import TransformerConfig

    cuda = torch.cuda.is_available()
    dtype = torch.float32 if tiny else torch.bfloat16
    return TransformerConfig(
        num_layers=4,
        hidden_size=64 if tiny else 2048,
        num_attention_heads=4 if tiny else 32,
        num_query_groups=4,
        kv_channels=16 if tiny else 128,
        ffn_hidden_size=64 if tiny else 6144,
        moe_ffn_hidden_size=64 if tiny else 768,
        num_moe_experts=8 if tiny else 128,
        moe_router_topk=2 if tiny else 8,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall" if cuda else "allgather",
        moe_grouped_gemm=HAVE_TE,
        moe_permute_fusion=HAVE_TE,
        transformer_impl="transformer_engine" if HAVE_TE else "local",
        expert_model_parallel_size=dist.get_world_size(),
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=HAVE_TE,
        normalization="RMSNorm",
        add_bias_linear=False,
        qk_layernorm=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=not cuda,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
    )


def _experts_of(config: Any) -> str:
    return "TEGroupedMLP" if config.moe_grouped_gemm else "sequential experts"


def _stock_spec(config: Any) -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    uses_te = config.transformer_impl == "transformer_engine"
    return get_gpt_decoder_block_spec(config, uses_te, config.normalization)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes in fp32, on a CPU too")
    args = parser.parse_args(argv)
    cuda = torch.cuda.is_available()
    if not (cuda or args.tiny):
        print("this program measures on CUDA devices, and there is none", file=sys.stderr)
        return 1
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    ran = run(args.rounds, tiny=args.tiny)
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    from phalanx.adapters import megatron

    megatron.release()
    dist.destroy_process_group()
    return 0 if ran else 1


if __name__ == "__main__":
    sys.exit(main())

"""scripts/lab/timeline.py: time and overlap by kind, from small synthetic traces."""

import gzip
import importlib
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.scripts.lab.timeline import (
    COLOURS,
    KINDS,
    Event,
    Trace,
    main,
    read,
    table,
    union,
    without,
)
from tests.support.runs import DEEPSEEK, SMALL, run, with_corpus

PUSH = "kernel_cutlass_kernel_kernelssm90pushPushKernel_object_at__"
FC1 = "kernel_cutlass_kernel_kernelssm90fc1_actFc1Kernel_object_at__Copy_Atom"


TRITON = {
    "kernels.elementwise.adam_triton.adamw_step": "Adam",
    "kernels.elementwise.sums_triton.square_sum": "optimizer",
    "kernels.core_attention.rope_triton.rope_rotate": "rope",
    "kernels.core_attention.latent_triton.mla_join_keys": "MLA keys",
    "kernels.core_attention.latent_triton.mla_split_key_gradient": "MLA keys",
    "kernels.core_attention.sinks_triton.attention_sink_gradient": "attention",
    "kernels.elementwise.cross_entropy.cross_entropy_statistics": "loss",
    "kernels.elementwise.cross_entropy.cross_entropy_gradient": "loss",
    "kernels.routing.plan_triton.pack_routing": "plan, sums",
    "kernels.routing.plan_triton.unpack_routing": "plan, sums",
    "kernels.elementwise.sums_triton.block_sum": "plan, sums",
    "extras.muon.elementwise_triton.muon_momentum": "optimizer",
    "extras.muon.elementwise_triton.muon_move": "optimizer",
    "extras.muon.newton_schulz.symmetric_triton.symmetric_product": "optimizer",
    "kernels.elementwise.sums_triton.add_parts": "plan, sums",
    "kernels.core_attention.max_logit_triton.attention_max_logit": "attention",
    "extras.linear_attention.gradients_triton.delta_rule_gradients": "attention",
    "kernels.routing.balance_triton.router_tally": "plan, sums",
    "kernels.routing.balance_triton.router_losses": "plan, sums",
    "kernels.routing.forced_triton.router_forced": "plan, sums",
    "kernels.routing.forced_triton.router_gradient_split": "plan, sums",
    "extras.replication.kernels.replication_plan_triton.replication_plan_kernel": "plan, sums",
    "extras.replication.kernels.replication_plan_triton.count_chunks_kernel": "plan, sums",
    "extras.replication.kernels.replication_plan_triton.assign_pairs_kernel": "plan, sums",
    "kernels.routing.plan_triton.split_order_kernel": "plan, sums",
    "extras.replication.kernels.rows_triton.split_returns_kernel": "plan, sums",
    "extras.replication.kernels.weights_triton.signal_grads_kernel": "exchange",
    "extras.replication.kernels.rows_triton.sum_unreduced_rows_kernel": "plan, sums",
    "extras.replication.kernels.weights_triton.send_weights_kernel": "exchange",
    "extras.replication.kernels.weights_triton.reduce_grads_kernel": "exchange",
    "kernels.sm90.experts.bias_products_triton.bias_products_kernel": "experts",
}


@pytest.mark.parametrize("where", TRITON)
def test_kernels_in_triton_say_what_they_are(where: str) -> None:
    pytest.importorskip("triton")
    module, _, name = where.rpartition(".")
    kernel = getattr(importlib.import_module(f"phalanx.{module}"), name)
    assert Event(0, 1, 1, kernel.__name__).kind == TRITON[where]


def test_no_shipped_kernel_is_of_another_kind() -> None:
    pytest.importorskip("cutlass")
    from phalanx.kernels.sm90.jit.shipped import SHIPPED

    kinds = {}
    for kernel in {kernel for kernel, _ in SHIPPED}:
        module = kernel.__module__.replace(".", "")
        symbol = f"kernel_cutlass_kernel_{module}{kernel.__name__}_object_at__Copy_Atom"
        kinds[kernel.__name__] = Event(0, 1, 1, symbol).kind
    assert set(kinds.values()) == {"exchange", "experts", "plan, sums", "loss"}
    assert {name for name, kind in kinds.items() if kind == "exchange"} == {
        *("PushKernel", "CombinePushKernel", "WaitPeersKernel"),
    }


def test_of_several_kinds_the_first_counts_and_each_has_a_colour() -> None:
    assert Event(0, 1, 1, "fused_rope_forward").kind == "rope"
    assert Event(0, 1, 1, "multi_tensor_apply_kernel<FusedAdamMathFunctor>").kind == "Adam"
    assert Event(0, 1, 1, "elementwise_kernel").kind == "other"
    assert Event(0, 1, 1, "chunk_gated_delta_rule_fwd_kernel_h_blockdim64").kind == "attention"
    assert Event(0, 1, 1, "l2norm_fwd_kernel").kind == "attention"
    assert Event(0, 1, 1, "multi_tensor_apply_kernel<L2NormFunctor>").kind == "optimizer"
    flash = (
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90_object_at_"
    )
    assert Event(0, 1, 1, flash).kind == "attention"
    assert len(COLOURS) == len(KINDS) == len(set(COLOURS))


def written(path: Path, *events: tuple[str, float, float, int]) -> Path:
    records = [
        {"ph": "X", "cat": "kernel", "name": n, "ts": 5000 + b, "dur": d, "args": {"stream": s}}
        for n, b, d, s in events
    ]
    records.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 1})
    text = json.dumps({"traceEvents": records})
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as file:
            file.write(text)
    else:
        path.write_text(text)
    return path


def test_time_alone_is_what_nothing_else_covers() -> None:
    some = union([Event(0, 10, 1, ""), Event(8, 20, 1, ""), Event(30, 40, 1, "")])
    assert some == [(0, 20), (30, 40)]
    assert without(some, []) == 30
    assert without(some, [(5, 8), (15, 35)]) == 30 - 3 - 5 - 5
    assert without(some, [(0, 100)]) == 0


def test_an_exchange_under_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = written(
        tmp_path / "trace_1_1.json.gz",
        (PUSH, 0, 1000, 2),
        (FC1, 250, 1750, 1),
        ("nvjet_tst_192x192", 3000, 1200, 1),
    )
    assert main([str(trace), "--top", "2"]) == 0
    output = capsys.readouterr().out
    assert "4.20 ms, the GPU idle in 1.00 ms" in output
    rows = {line[:12].strip(): line[12:].split() for line in output.splitlines() if line}
    assert rows["exchange"] == ["1.00", "0.25", "1"]
    assert rows["experts"] == ["1.75", "1.00", "1"]
    assert rows["GEMM"] == ["1.20", "1.20", "1"]
    assert "phalanx.kernels.sm90 Fc1Kernel" in output and "PushKernel" not in output


def test_a_window_is_cropped_read_again_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    trace = written(tmp_path / "t.json", (PUSH, 0, 10, 2), (FC1, 2000, 10, 1), (FC1, 9000, 1, 1))
    crop, picture = tmp_path / "crop.json", tmp_path / "picture.png"
    given = [str(trace), "--window", "1", "3", "--crop", str(crop), "--plot", str(picture)]
    assert main(given) == 0
    assert read(crop) == Trace([Event(0, 10, 1, FC1)], True, {})
    assert picture.stat().st_size > 1000
    assert table(read(crop), 1).startswith("0.01 ms")


def test_what_is_narrower_than_a_pixel_is_drawn(tmp_path: Path) -> None:
    """Events of a microsecond in two seconds, each a coloured mark in its lane."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    colours = pytest.importorskip("matplotlib.colors")
    begins = [37_000 + 241_000 * i + 97 * i * i for i in range(8)]
    events = [("adam_kernel", b, 1, 1) for b in begins]
    trace = written(tmp_path / "t.json", (FC1, 0, 10, 1), *events, (FC1, 2e6, 10, 1))
    picture = tmp_path / "p.png"
    assert main([str(trace), "--plot", str(picture)]) == 0
    image = pyplot.imread(picture)[:, :, :3]
    adam = colours.to_rgb(COLOURS[[kind for kind, _ in KINDS].index("Adam")])
    marked = (abs(image - adam).max(-1) < 0.02).any(0)  # of each column of pixels
    runs = (marked[1:] & ~marked[:-1]).sum()
    assert runs == 8


def test_steps_of_a_gpu_begin_with_the_first_kernel_that_they_launch(
    tmp_path: Path, figures: list[Any]
) -> None:
    records = [
        {"ph": "X", "cat": "user_annotation", "name": f"step {n}", "ts": ts, "dur": 90, "args": {}}
        for n, ts in ((5, 100), (6, 200))
    ]
    for number, (launch, begin) in enumerate([(50, 60), (110, 1000), (150, 2000), (210, 3000)]):
        at = {"correlation": number}
        records.append(
            {
                "ph": "X",
                "cat": "cuda_runtime",
                "name": "cudaLaunch",
                "ts": launch,
                "dur": 1,
                "args": at,
            }
        )
        at = at | {"stream": 7}
        records.append(
            {"ph": "X", "cat": "kernel", "name": FC1, "ts": begin, "dur": 500, "args": at}
        )
    path, crop, picture = tmp_path / "t.json", tmp_path / "crop.json", tmp_path / "p.png"
    path.write_text(json.dumps({"traceEvents": records}))
    assert read(path).steps == ((940, "step 5"), (2940, "step 6"))
    given = ["--window", "1.5", "4", "--crop", str(crop), "--plot", str(picture)]
    assert main([str(path), *given]) == 0
    drawn = [text.get_text().strip() for text in figures[0].axes[0].texts]
    assert drawn == ["step 5", "step 6"]
    assert [name for _, name in read(crop).steps] == drawn
    assert read(crop).steps[1][0] == 2940 - 1940


def operations(path: Path, *events: tuple[str, str, float, float, int]) -> Path:
    records = [
        {"ph": "X", "cat": cat, "name": name, "ts": 70 + begin, "dur": end - begin, "tid": tid}
        for cat, name, begin, end, tid in events
    ]
    facts = {"model": "tiny", "ranks": 2, "device": "CPU process", "sequence": 256, "steps": [5, 6]}
    path.write_text(json.dumps({"traceEvents": records, "phalanx": facts}))
    return path


def test_of_a_cpu_each_operation_has_its_own_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = operations(
        tmp_path / "t.json",
        ("user_annotation", "moe/experts", 0, 5000, 1),
        ("cpu_op", "phalanx::grouped_mlp", 1000, 5000, 1),
        ("cpu_op", "aten::mm", 1500, 4500, 1),
        ("user_annotation", "moe/dispatch", 5000, 8000, 1),
        ("cpu_op", "_Spread", 5000, 8000, 1),  # waits
        ("cpu_op", "aten::mul", 5000, 5500, 1),
        ("user_annotation", "gloo:all_to_all", 4000, 7900, 2),
        ("cpu_op", "aten::linear", 9000, 10000, 1),
        ("cpu_op", "aten::mm", 9000, 10000, 1),
    )
    assert main([str(trace), "--top", "4"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("tiny on 2 CPU processes, sequence 256: steps 5 to 6\n9.00 ms, ")
    assert "no operation in 1.00 ms of them" in output
    rows = {line[:12].strip(): line[12:].split() for line in output.splitlines() if line}
    assert rows["experts"] == ["4.00", "3.00", "2"]
    assert rows["exchange"] == ["4.00", "2.50", "2"]
    assert rows["plan, sums"] == ["0.50", "0.00", "1"]
    assert rows["GEMM"] == ["1.00", "1.00", "1"]
    assert "aten::mm" in output and rows["aten::mm"][-3:] == ["4.00", "2", "2000.0"]


def test_a_crop_of_a_cpu_trace_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Any]
) -> None:
    trace = operations(
        tmp_path / "t.json",
        ("user_annotation", "moe/experts", 0, 5000, 1),
        ("cpu_op", "aten::mul", 1000, 5000, 1),
        ("cpu_op", "aten::copy_", 2000, 4500, 1),
        ("cpu_op", "aten::sort", 6000, 6500, 1),
        ("user_annotation", "step 5", 0, 5900, 1),
        ("user_annotation", "step 6", 5900, 6600, 1),
    )
    assert [name for _, name in read(trace).steps] == ["step 5", "step 6"]
    crop, picture = tmp_path / "crop.json", tmp_path / "p.png"
    given = ["--window", "0", "4.2", "--crop", str(crop)]
    assert main([str(trace), *given, "--plot", str(picture)]) == 0
    first = capsys.readouterr().out
    assert main([str(crop), "--plot", str(picture), "--title", "two steps"]) == 0
    assert capsys.readouterr().out == first and "aten::sort" not in first
    axes = [figure.axes[0] for figure in figures]
    assert axes[0].get_title() == "tiny on 2 CPU processes, sequence 256: steps 5 to 6"
    assert axes[1].get_title() == "two steps"
    assert [[text.get_text() for text in one.texts] for one in axes] == [[" step 5"]] * 2
    for one in axes:
        assert [label.get_text() for label in one.get_yticklabels()] == ["other"]
        assert one.get_xlabel() == "ms from the first operation"
        assert sum(len(bars.get_paths()) for bars in one.collections) > 0


@pytest.mark.dist
def test_the_trace_of_a_run_on_two_ranks_is_told_and_drawn(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model, data = [*SMALL, *DEEPSEEK, "kernels=torch"], with_corpus(tmp_path)
    ranks = run(2, [*model, *data, "run.steps=3", "run.profile=[2,3]", f"run.dir={tmp_path}"])
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    trace, picture = tmp_path / "run/trace_2_3.json.gz", tmp_path / "picture.png"
    assert main([str(trace), "--plot", str(picture)]) == 0
    first, *rest = capsys.readouterr().out.splitlines()
    what = "run: tiny_deepseek on 2 CPU processes, bf16, torch experts, sequence 16, "
    assert first.startswith(what) and first.endswith(": steps 2 to 3")
    rows = itertools.takewhile(bool, rest[3:])
    times = {row[:12].strip(): float(row[12:].split()[0]) for row in rows}
    assert {"exchange", "experts", "plan, sums", "attention", "GEMM", "optimizer"} <= set(times)
    assert min(times.values()) > 0 and picture.stat().st_size > 5000


@pytest.mark.parametrize(
    ("name", "text", "reported"),
    [
        ("none.json", None, "No such file"),
        ("text.json", "hello", "no trace of torch.profiler"),
        ("empty.json", '{"traceEvents": []}', "no kernels or operations there"),
        ("list.json", "[]", "no trace of torch.profiler"),
        (
            "event.json",
            '{"traceEvents": [{"ph": "X", "cat": "kernel", "name": "add", "ts": 0}]}',
            "event.json has an event without 'dur'",
        ),
    ],
)
def test_bad_input_is_one_line(
    name: str, text: str | None, reported: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 2
    output = capsys.readouterr().err
    assert reported in output and output.count("\n") == 1

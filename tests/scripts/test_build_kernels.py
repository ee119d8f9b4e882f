"""build_kernels: a run only loads what it built; it skips, lists, selects, and names failures."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytest.importorskip("cutlass")

from phalanx.kernels.cache import Cache, statistics
from phalanx.kernels.core_attention import fa4
from phalanx.kernels.rms_norm import quack_library
from phalanx.kernels.sm90.jit import launch, shipped
from phalanx.kernels.sm90.jit.program import symbols
from phalanx.kernels.sm90.jit.shipped import SHIPPED
from phalanx.kernels.triton_table import launches
from phalanx.scripts import build_kernels

KERNEL, CONFIG = next(one for one in SHIPPED if one[0].__name__ == "GatherKernel")  # soon compiled
LABEL = f"{KERNEL.__name__} {CONFIG}"
TRITON = [each.label for each in launches()]
LABELS = [
    *(f"{kernel.__name__} {config}" for kernel, config in SHIPPED),
    *(f"flash-attn-4 {layer}" for layer in fa4.SHIPPED),
    *(f"QuACK {rows}" for rows in quack_library.SHIPPED),
    *TRITON,
]


@pytest.fixture(autouse=True)
def _of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "KERNELS", ())


class Here(ThreadPoolExecutor):
    """Stands in for a pool of processes, each of which would import the compiler."""

    def __init__(self, jobs: int, mp_context: Any) -> None:
        super().__init__(jobs)


@pytest.mark.extras
def test_a_run_compiles_nothing_that_was_built(tmp_path, capsys):
    build = ("--dir", str(tmp_path), "--only", LABEL, "--jobs", "1")
    assert build_kernels.main(build) == 0
    one, summary = capsys.readouterr().out.splitlines()
    assert one.startswith(f"[1/1] {LABEL}  ") and one.endswith(" s")
    assert summary.startswith("1 kernel built, 0 were cached, 0 failed")

    assert build_kernels.main(build) == 0
    assert capsys.readouterr().out.startswith("0 kernels built, 1 were cached, 0 failed")

    assert build_kernels.main(["--list", "--dir", str(tmp_path)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert listed == [f"{'cached ' if each == LABEL else 'missing'} {each}" for each in LABELS]

    before = vars(statistics()).copy()
    data = launch.build(KERNEL, CONFIG, Cache(tmp_path))
    launch.Program(symbols(data, launch.PREFIX), launch.arguments_of(KERNEL).kinds)
    counts = {name: count - before[name] for name, count in vars(statistics()).items()}
    assert (counts["compiled"], counts["loaded"]) == (0, 1)


@pytest.mark.extras
def test_the_kernels_of_a_run_are_listed(tmp_path, capsys):
    layer = fa4.AttentionLayer(3, 128, 128, deterministic=True, documents=True)
    rows = [
        quack_library.Rows(768, step, adds)
        for step in ("forward", "backward")
        for adds in (False, True)
    ]
    overrides = ("experiment=proof_moe_long", "data.document_mask=true", "run.deterministic=true")
    assert build_kernels.main(["--list", "--dir", str(tmp_path), "--run", *overrides]) == 0
    assert capsys.readouterr().out.splitlines() == [
        *(f"missing {label}" for label in LABELS[: len(SHIPPED)]),
        f"missing flash-attn-4 {layer}",
        *(f"missing QuACK {key}" for key in rows),
        *(f"missing {label}" for label in TRITON),
    ]


def test_workers_build_the_kernels_of_the_run(tmp_path, monkeypatch, capsys):
    def made(layer, folder):
        assert layer == fa4.AttentionLayer(8, 192, 192)

    monkeypatch.setattr(build_kernels, "ProcessPoolExecutor", Here)
    monkeypatch.setattr(fa4, "build", made)
    run = ("model=qwen3_30b_a3b", "model.attention.head_dim=192", "kernels.norm=torch")
    only = ("--dir", str(tmp_path), "--only", "flash-attn-4")
    assert build_kernels.main([*only, "--run", *run]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("1 kernel built, 0 were cached")


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["model=tini"], "error: model=tini: no such option; did you mean model=tiny"),
        (["run.stepz=3"], "error: run.stepz: no such knob; did you mean run.steps?"),
        (["model=tiny", "parallel.tensor=3"], "error: parallel.tensor=3"),
        (
            ["model=tiny_gpt_oss", "kernels.attention=fa4"],
            "error: kernels.attention=fa4 cannot run here: needs heads of 32 to 256 channels",
        ),
    ],
)
def test_a_wrong_override_is_a_line_and_the_code_2(overrides, line, capsys):
    with pytest.raises(SystemExit) as end:
        build_kernels.main(["--list", "--run", *overrides])
    assert end.value.code == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.startswith(line) and output.err.count("\n") == 1


def test_each_failure_has_a_line_and_the_code_is_1(tmp_path, monkeypatch, capsys):
    def broken(folder):
        raise OSError("lost.so")

    target = build_kernels.Target(LABEL, lambda folder: False, broken)
    monkeypatch.setattr(build_kernels, "targets", lambda sizes: [target])
    monkeypatch.setattr(build_kernels, "ProcessPoolExecutor", Here)
    assert build_kernels.main(["--dir", str(tmp_path)]) == 1
    one, summary = capsys.readouterr().out.splitlines()
    assert one == f"[1/1] {LABEL}  FAILED  OSError: lost.so"
    assert summary.startswith("0 kernels built, 0 were cached, 1 failed")


@pytest.mark.extras
def test_what_cannot_be_done_is_said_in_a_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    for arguments, output in (
        (["--dir", str(tmp_path / "file" / "folder")], "cannot write to"),
        (["--only", "no such kernel"], "no kernel contains 'no such kernel'"),
        (["--jobs", "0"], "--jobs 0: must be at least 1"),
    ):
        try:
            assert build_kernels.main(arguments) != 0
        except SystemExit as end:
            assert end.code != 0
        assert output in capsys.readouterr().err.splitlines()[-1]


def test_errors_of_the_compiler_take_one_line():
    error = ValueError("\n\x1b[91merror\x1b[0m: too\n   many\n\n registers\n")
    assert build_kernels.reason(error) == "ValueError: error: too many registers"


def test_without_the_compiler_there_is_one_line(monkeypatch, capsys):
    def lacking(sizes):
        raise ModuleNotFoundError("No module named 'cutlass'", name="cutlass")

    monkeypatch.setattr(build_kernels, "targets", lacking)
    assert build_kernels.main(["--list"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("no package cutlass, which compiles kernels: pip install '")
    assert "'nvidia-cutlass-dsl[cu13]==4.8.1'" in line

"""Commands of README and docs that run programs of the laboratory, and pages made of records."""

import shlex

from phalanx.configs.load import load
from phalanx.configs.records import launch
from phalanx.configs.validate import validate
from phalanx.scripts.lab import (
    bench_dispatch,
    bench_kernels,
    compare_throughput,
    make_routing,
    plot_losses,
    record_anchor,
    routing_load,
    timeline,
)
from phalanx.scripts.lab.compare.points import expand
from tests.support.pages import ROOT, TEXTS, commands

COMMANDS = commands()
PARSERS = {
    "bench_dispatch": bench_dispatch.arguments,
    "bench_kernels": bench_kernels.arguments,
    "compare_throughput": compare_throughput.parser().parse_intermixed_args,
    "make_routing": make_routing.parser().parse_intermixed_args,
    "plot_losses": plot_losses.parser().parse_args,
    "record_anchor": record_anchor.parser().parse_args,
    "routing_load": routing_load.parser().parse_args,
    "timeline": timeline.parser().parse_args,
}


def test_commands_are_understood() -> None:
    checked = set()
    for line in COMMANDS:
        words = shlex.split(line, comments=True)
        for name, parse in PARSERS.items():
            if f"scripts/lab/{name}.py" in words:
                args = parse(words[words.index(f"scripts/lab/{name}.py") + 1 :])
                checked.add(name)
                if name == "record_anchor":
                    ranks, overrides = launch(args.command)
                    validate(load(overrides), ranks)
                if name == "compare_throughput":
                    assert len(expand(args.overrides)) > 1
    assert checked == set(PARSERS)


def test_files_that_a_command_draws_from_are_there() -> None:
    drawn = [line for line in COMMANDS if "plot_losses.py" in line and "--title" in line]
    (args,) = [PARSERS["plot_losses"](shlex.split(line)[2:]) for line in drawn]
    curves = plot_losses.load([ROOT / path for path in args.runs])
    assert len(curves) == 2 and f"--parts {args.parts}" in drawn[0]
    means = [line.split()[-1] for line in plot_losses.table(curves, args.parts).splitlines()[1:]]
    page = " ".join(TEXTS["docs/performance.md"].split())
    assert "From step 200 on, means of 50 steps are within 0.01 of each other" in page
    assert len(means) == 10 and all(abs(float(mean)) <= 0.01 for mean in means[4:])

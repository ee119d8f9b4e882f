"""`scripts/plot_run.py`: a run in, a line on it, late ranks by name, and a picture out."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from phalanx.scripts import plot_run
from tests.support.scheduling import mostly_slow

FACTS = {"event": "start", "at": 0, "model": "tiny", "ranks": 2, "device": "CPU process"}


def _run(folder: Path, steps: int, **changes: Any) -> Path:
    """A run of two MoE layers, 2 and 4; its busiest expert and a dead one depend on the step."""
    folder.mkdir(parents=True)
    records: list[dict[str, Any]] = [FACTS]
    for step in range(1, steps + 1):
        record = {"step": step, "loss": 4 / step, "grad_norm": 1.0, "lr": 1e-3 * step}
        record |= {"tokens_per_second_per_gpu": 100.0 + step, "step_time": 0.5}
        record |= {"layers": {"2": [1 + step, 0], "4": [1.5, step % 3]}}
        records.append({k: v for k, v in (record | changes).items() if v is not None})
    text = "\n".join(map(json.dumps, records)) + '\n{"step": 9'
    (folder / "metrics.jsonl").write_text(text)
    return folder


def panels(figure: Any) -> dict[str, Any]:
    return {axes.get_title(loc="left").split(" (")[0]: axes for axes in figure.axes}


def test_the_script_has_help() -> None:
    command = [sys.executable, str(plot_run.__file__), "--help"]
    output = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert output.returncode == 0 and "--steps" in output.stdout


@mostly_slow("steps", [1, 2, 30, 900], 1, 900)
def test_six_panels_show_the_numbers_of_the_run(
    steps: int, tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", steps)
    assert plot_run.main([str(run)]) == 0
    output, drawn = capsys.readouterr().out.splitlines()
    assert output.startswith(f"steps 1 to {steps}, loss 4.0000 to {4 / steps:.4f}, ")
    assert drawn == f"drawn: {run / 'curves.png'}"
    assert (run / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    (figure,) = figures
    assert figure.get_suptitle() == "tiny on 2 CPU processes"
    actual = panels(figure)
    rate = actual["learning rate"].lines[0]
    assert np.allclose(rate.get_ydata(), 1e-3 * np.arange(1, steps + 1))
    assert rate.get_clip_on() == (steps > 50), "points on the frame are whole"
    assert actual["loss"].get_yscale() == ("log" if steps > 12 else "linear")
    (load,) = actual["load of the busiest expert"].collections
    cells = load.get_array()
    assert cells.shape[0] == 2 and cells.shape[1] == min(steps, 300 if steps == 900 else 400)
    assert cells[0, -1] == steps + 1 and set(cells[1].tolist()) == {1.5}
    (dead,) = actual["dead experts"].collections
    assert dead.get_array().max() == min(steps, 2) and dead.get_array()[0].max() == 0
    labels = actual["dead experts"].get_yticklabels()
    assert [label.get_text() for label in labels] == ["layer 2", "4"]
    scales = [load.colorbar, dead.colorbar]
    assert [scale.ax.get_ylabel() for scale in scales] == ["x the mean", "experts"]
    assert [actual[name].get_ylabel() for name in ("loss", "dead experts")] == ["", ""]


def test_the_smooth_line_is_named_and_has_no_bias(tmp_path: Path, figures: list[Any]) -> None:
    """A straight line stays straight up to its ends, and a steep loss is not drawn too high."""
    run = _run(tmp_path / "run", 200)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:-1]]
    for record in lines:
        record |= {"loss": 6.0 - 0.02 * record["step"], "grad_norm": 4 + 100 / record["step"]}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert plot_run.main([str(run)]) == 0
    actual = panels(figures[0])
    for name in ("loss", "gradient norm"):
        raw, smooth = actual[name].lines
        assert [text.get_text() for text in actual[name].get_legend().get_texts()] == [
            "centred mean of 19 logged steps"
        ]
        assert smooth.get_xdata().tolist() == raw.get_xdata().tolist() == [*range(1, 201)]
        if name == "loss":
            assert np.allclose(smooth.get_ydata(), raw.get_ydata())
    raw, smooth = actual["gradient norm"].lines
    assert smooth.get_ydata()[0] == raw.get_ydata()[0]
    assert (smooth.get_ydata()[20:] - raw.get_ydata()[20:]).max() < 0.6  # of 4.8 to 9


def test_the_run_has_its_name_in_the_title(tmp_path: Path, figures: list[Any]) -> None:
    run = _run(tmp_path / "run", 2)
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(
        json.dumps(FACTS | {"run": "first"}) + "\n" + text[text.index("\n") :]
    )
    assert plot_run.main([str(run)]) == 0
    assert figures[0].get_suptitle() == "first: tiny on 2 CPU processes"


@mostly_slow("steps", [7, 60], 60)
def test_cells_lie_at_their_steps(steps: int, tmp_path: Path, figures: list[Any]) -> None:
    assert plot_run.main([str(_run(tmp_path / "run", steps))]) == 0
    (cells,) = panels(figures[0])["load of the busiest expert"].collections
    edges = cells.get_coordinates()[0, :, 0]
    for step in range(1, steps + 1):
        inside = int(np.searchsorted(edges, step)) - 1
        assert edges[inside] < step < edges[inside + 1]
        assert cells.get_array()[0, inside] == 1 + step


def test_no_dead_experts_have_whole_numbers_and_no_scale_of_fractions(
    tmp_path: Path, figures: list[Any]
) -> None:
    layers = {"1": [1.5, 0], "2": [1.5, 0]}
    assert plot_run.main([str(_run(tmp_path / "run", 5, layers=layers))]) == 0
    (figure,) = figures
    panel = panels(figure)["dead experts"]
    assert panel.get_title(loc="left") == "dead experts (none)"
    ticks = panel.collections[0].colorbar.get_ticks()
    assert all(tick == int(tick) for tick in ticks) and len(ticks) <= 2


def test_two_more_panels_where_logits_were_measured(tmp_path: Path, figures: list[Any]) -> None:
    run = _run(tmp_path / "run", 6)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:-1]]
    for record in lines[2::3]:
        record |= {"max_logit": 10.0 * record["step"]}
        record |= {"max_logits": {"1": -0.5, "2": 10.0 * record["step"]}}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert plot_run.main([str(run)]) == 0
    actual = panels(figures[0])
    assert actual["largest attention logit"].lines[0].get_xydata().tolist() == [[3, 30], [6, 60]]
    (image,) = actual["largest attention logit of a layer"].collections
    assert image.get_array().tolist() == [[-0.5, -0.5], [30, 60]]
    assert image.get_clim() == (-0.5, 60)
    assert "dead experts" in actual


def test_numbers_that_are_none_are_told(
    tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", 3, max_logits={"2": math.nan, "4": math.inf}, max_logit=None)
    lost = {"step": 4, "loss": None, "nonfinite": {"loss": "nan"}}
    content = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(f"{json.dumps(lost)}\n{content}")
    assert plot_run.main([str(run)]) == 0
    _, reported, _ = capsys.readouterr().out.splitlines()
    assert reported == "1 step with a loss that is NaN or infinite is left out: 4"
    logits = panels(figures[0])["largest attention logit of a layer"]
    assert [text.get_text() for text in logits.texts] == ["NaN or infinite"]


def test_a_part_of_the_steps(tmp_path: Path, figures: list[Any]) -> None:
    run = _run(tmp_path / "run", 30)
    out = tmp_path / "part.png"
    assert plot_run.main([str(run), "--steps", "5", "9", "--plot", str(out), "--title", "x"]) == 0
    (figure,) = figures
    assert panels(figure)["learning rate"].lines[0].get_xdata().tolist() == [5, 6, 7, 8, 9]
    assert out.exists() and figure.get_suptitle() == "x"


def test_validation_and_what_older_runs_lack(tmp_path: Path, figures: list[Any]) -> None:
    older = _run(tmp_path / "run", 3, layers=None, load_max=2.5, dead_experts=1, grad_norm=None)
    more = '\n{"step": 2, "valid_loss": 1.5, "valid_loss/code": 1.25, "valid_loss/wiki": 1.75}'
    more += '\n{"step": 3, "loss": null}\n'
    (older / "metrics.jsonl").open("a").write(more)
    assert plot_run.main([str(older)]) == 0
    actual = panels(figures[0])
    valid = next(line for line in actual["loss"].lines if line.get_label() == "validation")
    assert list(valid.get_xdata()) == [2] and list(valid.get_ydata()) == [1.5]
    assert not valid.get_clip_on(), "the last point is on the frame"
    domains = {line.get_label(): list(line.get_ydata()) for line in actual["loss"].lines}
    assert domains["code"] == [1.25] and domains["wiki"] == [1.75]
    assert list(actual["loss"].lines[0].get_xdata()) == [1, 2]
    assert actual["load of the busiest expert"].lines[0].get_ydata().tolist() == [2.5] * 3
    assert actual["gradient norm"].texts[0].get_text() == "not recorded"


def test_late_ranks_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _run(tmp_path / "run", 4, late={"7": 0.1, "3": 0.05})
    (run / "metrics.jsonl").open("a").write('\n{"step": 5, "step_time": 1, "late": {"7": 0.35}}\n')
    (run / "launches").mkdir()
    nodes = [{"host": "a", "ranks": "0-2, 4-6"}, {"host": "b", "ranks": "7-8"}]
    (run / "launches" / "1.yaml").write_text(json.dumps({"hosts": nodes}))
    pytest.importorskip("matplotlib")
    assert plot_run.main([str(run)]) == 0
    head, seven, three = [line.split() for line in capsys.readouterr().out.splitlines()[1:-1]]
    assert head == ["late", "rank", "records", "behind", "of", "a", "step", "host"]
    assert seven == ["7", "100%", "0.150", "s", "25%", "b"]
    assert three == ["3", "80%", "0.050", "s", "10%", "?"]
    (run / "launches" / "1.yaml").write_text("hosts: [")
    assert plot_run.hosts(run) == {}


def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path / "run", 3)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "metrics.jsonl").write_text(json.dumps(FACTS))
    (tmp_path / "other").mkdir()
    other = {"step": 1, "loss": 1.0, "layers": {"1": [1.0]}}
    (tmp_path / "other" / "metrics.jsonl").write_text(json.dumps(other))
    for given, why in (
        ([tmp_path / "none"], "none: No such file or directory"),
        ([tmp_path], "metrics.jsonl: No such file or directory"),
        ([tmp_path / "empty"], "has no steps: give the folder of a run"),
        ([run, "--steps", "8", "9"], "--steps 8 9: the run has steps 1 to 3"),
        ([tmp_path / "other"], "has numbers that no run of this version writes"),
        ([run, "--plot", tmp_path / "no" / "x.png"], "x.png: No such file or directory"),
    ):
        assert plot_run.main([str(word) for word in given]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("plot_run: ") and why in line
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plot_run.main([str(run)]) == 2
    assert "a picture needs matplotlib: pip install" in capsys.readouterr().err


def test_goodput_and_what_the_rest_went_to(
    tmp_path: Path, figures: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = _run(tmp_path / "run", 4)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()[1:-1]]
    for record in records:
        step = record["step"]
        record |= {"seconds": {"start": 2.0, "training": 6.0 * step, "data": 2.0 * step}}
        record |= {"goodput": 6 * step / (2 + 8 * step)}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert plot_run.main([str(run)]) == 0
    assert "goodput 70.6% of 34 s; data 23.5%, start 5.9%\n" in capsys.readouterr().out
    end = {"event": "summary", "at": 4, "seconds": records[-1]["seconds"] | {"checkpoints": 6.0}}
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, [*records, end])))
    assert plot_run.main([str(run)]) == 0
    printed = capsys.readouterr().out
    assert "goodput 60.0% of 40 s; data 20.0%, checkpoints 15.0%, start 5.0%\n" in printed
    actual = panels(figures[0])
    assert len(actual) >= 8
    drawn = actual["goodput"].lines[0].get_ydata()
    assert np.allclose(drawn, [0.6, 12 / 18, 18 / 26, 24 / 34])
    share = actual["share of time that did not train"]
    assert [text.get_text() for text in share.get_legend().get_texts()] == ["start", "data"]
    top = max(point[1] for area in share.collections for point in area.get_paths()[0].vertices)
    assert top == pytest.approx(0.4), "of the first step, which has most of the start"


def test_scores_of_tasks_have_two_panels(tmp_path: Path, figures: list[Any]) -> None:
    """Moving averages are dashed lines of the same colour."""
    run = _run(tmp_path / "run", 4)
    scores: list[dict[str, Any]] = []
    for step in (2, 4):
        scores.append({"step": step, "tasks/sums/acc": step / 10, "tasks/sums/acc_norm": 0.5})
        scores.append({"step": step, "tasks/text/bits_per_byte": 2.0, "tasks/centered": 0.1})
        scores.append({"step": step, "tasks_ema/sums/acc": step / 5})
    with (run / "metrics.jsonl").open("a") as stream:
        stream.write("\n" + "\n".join(map(json.dumps, scores)))
    assert plot_run.main([str(run)]) == 0
    actual = panels(figures[0])
    plain, averaged = actual["tasks: share that is right"].lines
    assert plain.get_ydata().tolist() == [0.2, 0.4] and plain.get_label() == "sums"
    assert averaged.get_ydata().tolist() == [0.4, 0.8]
    assert averaged.get_linestyle() == "--" and averaged.get_color() == plain.get_color()
    (bits,) = actual["tasks: bits per byte"].lines
    assert bits.get_xdata().tolist() == [2, 4] and bits.get_label() == "text"

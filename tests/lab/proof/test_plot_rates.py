"""`scripts/lab/proof/plot_rates.py` on written runs: series, best rates, factors, picture."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx.scripts.lab.proof import plot_rates
from phalanx.scripts.lab.proof.plot_rates import MUP, PLAIN, Series, best, factors

RATES = (5e-4, 1e-3, 2e-3, 4e-3)


def bits(rate: float, low: float) -> float:
    """A parabola over the logarithm of rates."""
    return 2 + 0.1 * math.log(rate / low) ** 2


def run(
    folder: Path, width: int, rate: float, bits: float, *variants: str, ends: bool = True
) -> str:
    folder.mkdir(parents=True)
    config = {"model": {"hidden": width, "variants": [*variants]}, "optim": {"lr": rate}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    rows = [{"step": 9, "valid_bits_per_byte": bits}, {"event": "summary", "at": 9}]
    text = "".join(json.dumps(row) + "\n" for row in rows[: 1 + ends])
    (folder / "metrics.jsonl").write_text(text)
    return str(folder)


def sweeps(folder: Path, lows: dict[tuple[int, str], float]) -> list[str]:
    return [
        run(folder / f"{kind}{width}_{rate}", width, rate, bits(rate, low), *[kind] * bool(kind))
        for (width, kind), low in lows.items()
        for rate in RATES
    ]


def test_the_best_rate_is_that_of_the_parabola() -> None:
    low = best({rate: bits(rate, 1.3e-3) for rate in RATES})
    assert low.rate == pytest.approx(1.3e-3) and low.bits == pytest.approx(2) and not low.at_end
    assert best({1e-3: 2.0, 2e-3: 2.1, 4e-3: 2.3}) == (1e-3, 2.0, True)
    assert best({1e-3: 2.2, 2e-3: 2.1, 4e-3: 2.0}) == (4e-3, 2.0, True)
    assert best({1e-3: 2.0, 2e-3: 2.0, 4e-3: 2.0}).rate in (1e-3, 2e-3, 4e-3)


def test_a_model_of_the_base_width_belongs_to_both_kinds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], figures: list[Any]
) -> None:
    lows = {(64, "mup:64"): 2e-3, (256, "mup:64"): 1.6e-3, (256, ""): 1e-3}
    runs, out = sweeps(tmp_path / "runs", lows), tmp_path / "rates.json"
    picture = tmp_path / "rates.png"
    assert plot_rates.main([*runs, "--json", str(out), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "mup: the best rate moves by a factor of 1.25 over its widths" in printed
    assert "plain: the best rate moves by a factor of 2.00 over its widths" in printed
    written = json.loads(out.read_text())
    assert [(s["kind"], s["width"]) for s in written["series"]] == [
        *((MUP, 64), (MUP, 256)),
        *((PLAIN, 64), (PLAIN, 256)),
    ]
    assert written["factors"] == pytest.approx({MUP: 1.25, PLAIN: 2.0})
    mup, plain = figures[0].axes
    assert (mup.get_title(), plain.get_title()) == (MUP, PLAIN) and picture.exists()
    assert list(mup.lines[0].get_xdata()) == list(RATES)


def test_a_kind_with_one_width_has_no_factor() -> None:
    points = {rate: bits(rate, 2e-3) for rate in RATES}
    assert factors({Series(MUP, 64): points}) == {}


def test_runs_without_an_end_or_a_loss_are_left_out_and_too_few_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = sweeps(tmp_path, {(64, ""): 1e-3})
    runs.append(run(tmp_path / "bad", 64, 1.0, float("nan")))
    runs.append(run(tmp_path / "cut", 64, 2.0, 1.5, ends=False))
    assert plot_rates.main(runs) == 0
    assert "1.00e-03" in capsys.readouterr().out
    assert plot_rates.main(runs[:2]) == 2
    assert plot_rates.main([str(tmp_path / "none")]) == 2
    short, missing = capsys.readouterr().err.splitlines()
    assert (
        short == "plot_rates: plain of width 64 has fewer than 3 runs that ended with finite bits"
    )
    assert missing.startswith("plot_rates: ") and "none/config.yaml" in missing

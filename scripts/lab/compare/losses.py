"""Loss curves of a comparison's points in one picture, from their first repeats."""

from collections.abc import Sequence
from pathlib import Path

from phalanx.scripts.lab import plot_losses
from phalanx.scripts.lab.compare.results import Run


def show(folders: Sequence[Path], labels: Sequence[str], runs: Sequence[Run], title: str) -> str:
    """Draw losses.png two folders above the runs; return a table of losses.

    `folders` are those of each point's first run; failed runs are not shown.
    """
    finished = {run.point for run in runs if not run.reason and run.repeat == 0}
    if not finished:
        return "no losses: no point has a result"
    curves: plot_losses.Curves = {}
    for point in sorted(finished):
        (curve,) = plot_losses.load([folders[point]]).values()
        curves[labels[point]] = curve._replace(facts={})
    path = folders[0].parents[1] / "losses.png"
    text = "\n".join([plot_losses.table(curves, None), *plot_losses.remarks(curves)])
    try:
        plot_losses.plot(curves, path, title)
    except ValueError as error:  # there is no matplotlib
        return f"{text}\n\nno picture: {error}"
    return f"{text}\n\n{path}"

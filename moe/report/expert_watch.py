"""Warns about dead experts and about layers that send most tokens to few experts.

The trainer passes the balance of every logged step. Short episodes of either are normal, above all
early in training; only lasting ones cause a warning, at most one every `EVERY` steps.
"""

from phalanx.configs.knobs import pluralize
from phalanx.moe.router.balance import Balance

PATIENCE = 100  # steps for which an expert has no token, or a layer is collapsed, before a warning
EVERY = 500  # steps between two warnings of one kind
_REMEDY = "raise model.moe.router.bias_rate or a balancing loss (aux_loss, seq_aux_loss)"


class ExpertWatch:
    """Detects dead experts and collapsed layers.

    Args:
        most: load of an expert over the mean if every token chose it: experts / top_k.
        step: step that the run starts from.
    """

    def __init__(self, most: float, step: int) -> None:
        self._most, self._limit = most, (1 + most) / 2
        self._step = step
        self._idle: dict[tuple[int, int], int] = {}  # (layer, expert) -> last step with a token
        self._heavy: dict[int, int] = {}  # layer -> last step below the limit
        self._warned: dict[str, int] = {}  # kind of warning -> step of the last one

    def look(self, balance: Balance, step: int) -> list[str]:
        """Warnings due at `step`, one line each; `balance` covers the steps since the last call."""
        before, self._step = self._step, step
        heavy = [layer for layer, load in balance.load.items() if load > self._limit]
        self._idle = {key: self._idle.get(key, before) for key in balance.idle}
        self._heavy = {layer: self._heavy.get(layer, before) for layer in heavy}
        warnings = []
        if dead := sorted(k for k, since in self._idle.items() if step - since >= PATIENCE):
            names = ", ".join(f"layer {layer} expert {expert}" for layer, expert in dead[:3])
            more = ", ..." if len(dead) > 3 else ""
            count = pluralize(len(dead), "expert")
            text = f"{count} had no token for {PATIENCE} steps ({names}{more})"
            warnings += self._due("dead", text)
        if late := [layer for layer, since in self._heavy.items() if step - since >= PATIENCE]:
            worst = max(late, key=lambda layer: balance.load[layer])
            have = "has" if len(late) == 1 else "have"
            text = (
                f"{pluralize(len(late), 'layer')} {have} collapsed for {PATIENCE} steps: the "
                f"busiest expert of layer {worst} has {balance.load[worst]:.1f} x the mean load, "
                f"of at most {self._most:.1f}"
            )
            warnings += self._due("collapsed", text)
        return warnings

    def rewind(self, step: int) -> None:
        """Forget everything after `step`, to which the run returns."""
        self._step = step
        self._idle.clear()
        self._heavy.clear()

    def _due(self, kind: str, text: str) -> list[str]:
        if self._step - self._warned.get(kind, -EVERY) < EVERY:
            return []
        self._warned[kind] = self._step
        return [f"warning: {text}; {_REMEDY}"]

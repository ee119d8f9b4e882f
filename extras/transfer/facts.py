"""Rules of configurations with `mup` and `mup_ffn`, entries of `VARIANTS`; without torch.

They change how a model begins and is updated, and neither its tensors nor its products.
"""

from collections.abc import Iterator

from phalanx.configs.arithmetic.layers import ATTENTION, has_experts, mixer_layers
from phalanx.configs.knobs import repair
from phalanx.configs.schema import Config
from phalanx.configs.tables.capabilities import RATES
from phalanx.extras.variants.facts import Variant

_KNOB = "model.variants"


class Base(Variant):
    """Rates and initial scales are those of a model of width `size` (`extras.transfer.scales`)."""

    name = "mup"
    begins = "phalanx.extras.transfer.begin:begin"
    trains = "phalanx.extras.transfer.begin:lines"

    def problems(self, cfg: Config) -> Iterator[str]:
        m, left = cfg.model, self._left_out(cfg)
        if others := [text for text in m.variants if not text.startswith(RATES)]:
            mine = [text for text in m.variants if text.startswith(RATES)]
            reason = f"has mup beside {others[0]}, whose weights have no rule of widths"
            yield repair(cfg, _KNOB, reason, mine)
            return
        own = next((name for name in mixer_layers(m) if name != ATTENTION), "")
        if own or m.attention.kind != "gqa":
            what = f"has {own}" if own else f"has attention.kind={m.attention.kind}"
            reason = f"has mup, which has rules for gqa alone, and the model {what}"
            left = [text for text in left if not text.startswith(RATES)]
            yield repair(cfg, _KNOB, reason, left)


class ExpertBase(Variant):
    """Experts of the model of the base width have `size` channels; else they are in proportion."""

    name = "mup_ffn"

    def problems(self, cfg: Config) -> Iterator[str]:
        m = cfg.model
        if not any(text.startswith("mup:") for text in m.variants):
            reason = "has mup_ffn without mup:<width>, the width that it belongs to"
            yield repair(cfg, _KNOB, reason, self._left_out(cfg))
        elif not has_experts(m):
            reason = "has mup_ffn, which needs experts, and model.moe.experts is 0"
            yield repair(cfg, _KNOB, reason, self._left_out(cfg))

"""Decisions of a run that its configuration leaves open: one value, the same on all ranks."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from phalanx.configs.capture import CAPTURED
from phalanx.configs.layout import document_places
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import ExpertBackend, attention_backend, expert_backend
from phalanx.kernels.expert_mlp.mlp_spec import Margins
from phalanx.kernels.registry import Choice
from phalanx.kernels.wgrad_queue import Waiting
from phalanx.parallel.dispatcher.exchange import SymmOptions
from phalanx.parallel.dispatcher.transport_class import Transport

type Lines = Callable[[], Sequence[Choice]]
"""Lines of the start page, which may take milliseconds to estimate."""


@dataclass(frozen=True)
class Plan:
    """Decisions of `moe.plan.resolve.resolve`, of which nobody makes one again.

    Process groups, buffers and streams follow from it, and are not part of it.
    """

    cfg: Config
    """Configuration without `auto`. Nothing changes it."""
    world: int  # number of ranks
    other_mixer: tuple[str, ...]
    """Backend of the mixer that some layers have in place of core attention, if any."""
    transports: tuple[Transport, ...]
    """Transport of each expert-parallel group, in the order of their ranks."""
    exchanges: tuple[SymmOptions, ...]  # options of the exchanges of each group
    nodes: tuple[str, ...] = field(repr=False)  # name of the node of each rank
    held: tuple[int | None, ...]  # `wgrad_queue.Waiting.held` of each pipeline stage
    hides_exchanges: bool  # weight gradients hide exchanges of the backward pass
    pairs: bool  # weight gradients of experts are computed for two micro-batches at once
    margins: Margins  # SMs that kernels leave free
    _lines: tuple[Lines, ...] = field(repr=False, compare=False)

    @property
    def experts(self) -> ExpertBackend:
        """Facts of the experts' backend."""
        return expert_backend(self.cfg.kernels.backend)

    @property
    def captured(self) -> bool:
        """Steps are captured in a CUDA graph and replayed."""
        return self.cfg.run.graph == CAPTURED

    @property
    def overlaps(self) -> bool:
        """Forward passes run beside backward passes of other micro-batches."""
        return self.cfg.parallel.overlap_microbatches == "on"

    @property
    def document_slots(self) -> int:
        """Most documents of a sequence, if core attention needs their bounds; else 0."""
        data, attention = self.cfg.data, attention_backend(self.cfg.kernels.attention)
        return document_places(data) if data.document_mask and attention.document_bounds else 0

    def transport(self, rank: int) -> Transport:
        """Transport of a rank's expert-parallel group, whose ranks are consecutive."""
        return self.transports[self._group(rank)]

    def exchange(self, rank: int) -> SymmOptions:
        """Options of the exchanges of a rank's group."""
        return self.exchanges[self._group(rank)]

    def waiting(self, stage: int) -> Waiting:
        """Events for which the weight gradients of a pipeline stage wait."""
        return Waiting(self.held[stage], self.hides_exchanges, self.pairs)

    def lines(self) -> list[Choice]:
        """Lines of the start page with the reason of each decision, in its order."""
        return [line for lines in self._lines for line in lines()]

    def digest(self) -> str:
        """Digest of all decisions, and of what they are about; folders of ranks may differ."""
        cfg = self.cfg
        about = cfg.model, cfg.parallel, cfg.kernels, cfg.precision, cfg.run.graph, cfg.run.device
        decided = {f.name: getattr(self, f.name) for f in fields(self) if f.compare}
        del decided["cfg"]
        return hashlib.sha256(repr((about, decided)).encode()).hexdigest()

    def _group(self, rank: int) -> int:
        return rank * len(self.transports) // self.world

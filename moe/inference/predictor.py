"""The model of a checkpoint, on one process and without an optimizer.

Everything is built as for training on one rank: kernels of this machine, the precision of the run,
all experts local. Layers of multi-token prediction are left out, as the next token needs none.

Legend: B sequences, S tokens of a sequence, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from phalanx.configs.knobs import put
from phalanx.configs.schema import Config
from phalanx.configs.tables.backends import expert_backend
from phalanx.configs.validate import ConfigError, validate
from phalanx.moe.inference.decoder import Decoder
from phalanx.moe.model.packed import packed
from phalanx.moe.plan.described import agreed_plan
from phalanx.moe.router.recording import read_facts
from phalanx.moe.run.setup import build_model
from phalanx.parallel.checkpoint.saved_knobs import understood
from phalanx.parallel.checkpoint.verify import warn
from phalanx.parallel.checkpoint.weights import load_weights, read_common, verify
from phalanx.parallel.object_store import Place
from phalanx.parallel.runtime import Runtime, start
from phalanx.parallel.runtime import stop as stop_runtime

_TILE = 128  # sequences on a GPU are padded to a multiple of it, so that kernels meet few shapes
_CONTEXT = 4096  # context of an imported model whose folder names none
_SECTIONS = ("model.", "precision.", "data.")
"""Sections of a saved configuration that weights and text depend on."""


class NotFinite(ValueError):
    """A model computed NaN or infinite numbers."""


class Predictor:
    """Next tokens by the model of a checkpoint, in this process, the only one.

    `read` is progress of the verification, as `parallel.checkpoint.weights.verify` takes it.

    Raises:
        NoUsableCheckpoint, CheckpointMismatch: the checkpoint cannot be used, or its configuration
            is not understood.
        ConfigError: its configuration cannot run here, or a routing that it replays is gone.
    """

    def __init__(
        self, path: Place, runtime: Runtime, read: Callable[[int], object] | None = None
    ) -> None:
        record = verify(path, read)
        self.common = read_common(path, record)  # besides tensors: `step`, `config`, `huggingface`
        self.path, self.step, self.device = path, record.step, runtime.device
        self.cfg = of_one_process(self.common)
        if ignored := understood(self.common.get("config", {})).ignored_note():
            warn(f"{path}: {ignored}")
        validate(self.cfg, 1)
        _find_replayed(self.cfg)
        self.plan, _ = agreed_plan(self.cfg, runtime)
        built = build_model(self.plan, runtime)
        self._budget, self._places = built.budget, self.plan.document_slots
        (chunk,) = built.chunks
        load_weights(path, record, [chunk], built.groups.pg.dp_cp)
        # As the engine wraps it, which casts the parameters.
        self._model = Float16Module(built.config, chunk) if built.config.bf16 else chunk
        self._model.eval()
        self._as_is = {"fp32_output": False} if built.config.bf16 else {}

    def logits(self, tokens_BS: Tensor) -> Tensor:
        """Logits of the token after each, fp32 [B, S, V]; `tokens_BS` are int64, on any device.

        Raises NotFinite if a logit is NaN or infinite, as the other methods do.
        """
        return self._finite(self._forward(tokens_BS, None)[:, : tokens_BS.size(1)], "logits")

    def next_logits(self, tokens_1S: Tensor) -> Tensor:
        """Logits of the token after the last one, fp32 [V]."""
        return self._finite(self._forward(tokens_1S, None)[0, tokens_1S.size(1) - 1], "logits")

    @cached_property
    def decoder(self) -> Decoder:
        """The model with caches, for text of one token after another."""
        reads_host = expert_backend(self.plan.cfg.kernels.backend).host_counts
        graphs = self.device.type == "cuda" and not reads_host
        return Decoder(self.cfg.model, self._model, self._read, self._finite, graphs=graphs)

    def _read(self, tokens_BS: Tensor) -> Tensor:
        return self._forward(tokens_BS, None)

    def losses(
        self, tokens_BS: Tensor, labels_BS: Tensor, position_BS: Tensor | None = None
    ) -> Tensor:
        """Cross entropy of each int64 label, fp32 [B, S], in nats.

        `position_BS`, int64, is the position of each token in its piece of a document, for a run
        with `data.document_mask`: a token attends to its own piece only. None: to all before.
        """
        if position_BS is None:
            losses = self._forward(tokens_BS, labels_BS)[:, : tokens_BS.size(1)]
            return self._finite(losses, "losses")
        rows = zip(*(t.split(1) for t in (tokens_BS, labels_BS, position_BS)), strict=True)
        return torch.cat([self._apart(*row) for row in rows])

    def _apart(self, tokens_1S: Tensor, labels_1S: Tensor, position_1S: Tensor) -> Tensor:
        """Losses [1, S] of a sequence of documents; its mask on a CPU is [S, S]."""
        tokens, labels = self._padded(tokens_1S), self._padded(labels_1S)
        # What fills the sequence up belongs to its last piece.
        position, more = position_1S.to(self.device), tokens.size(1) - position_1S.size(1)
        after = torch.arange(1, more + 1, device=self.device)
        position = torch.cat((position, position[:, -1:] + after), 1)
        # As in training if that is enough: kernels are compiled for a number of document slots.
        places = max(self._places, int((position == 0).sum())) if self._places else 0
        documents = packed(position, places=places)
        result = self._computed(tokens, position, labels, packed_seq_params=documents)
        return self._finite(result[:, : tokens_1S.size(1)], "losses")

    def _finite(self, values: Tensor, name: str) -> Tensor:
        values = values.float()
        if values.isfinite().all():
            return values
        for parameter, weight in self._model.named_parameters():
            if not weight.isfinite().all():
                raise NotFinite(
                    f"{self.path} has weights that are NaN or infinite, such as "
                    f"{parameter.removeprefix('module.')}: choose an earlier checkpoint"
                )
        raise NotFinite(
            f"{self.path} has {name} that are NaN or infinite, with finite weights and "
            f"precision.recipe={self.cfg.precision.recipe}: choose an earlier checkpoint"
        )

    def _forward(self, tokens_BS: Tensor, labels_BS: Tensor | None) -> Tensor:
        tokens_BS = self._padded(tokens_BS)
        labels_BS = None if labels_BS is None else self._padded(labels_BS)
        positions_BS = torch.arange(tokens_BS.size(1), device=self.device).expand_as(tokens_BS)
        return self._computed(tokens_BS, positions_BS, labels_BS)

    @torch.no_grad()
    def _computed(
        self, tokens_BS: Tensor, position_BS: Tensor, labels_BS: Tensor | None, **more: Any
    ) -> Tensor:
        while True:
            result: Tensor = self._model(
                tokens_BS, position_BS, None, labels=labels_BS, **self._as_is, **more
            )
            if not self._budget.exceeded(self._budget.record().tolist()):
                return result
            self._budget.grow()

    def _padded(self, ids_BS: Tensor) -> Tensor:
        """Move ids to the device, padded to full tiles on a GPU; later tokens change no result."""
        ids_BS = ids_BS.to(self.device)
        tile = _TILE if self.device.type == "cuda" else 1
        return F.pad(ids_BS, (0, -ids_BS.size(1) % tile))


@contextmanager
def opened(path: Place, read: Callable[[int], object] | None = None) -> Iterator[Predictor]:
    """The model of a checkpoint, as `Predictor`; its process group is destroyed after the block."""
    joined = dist.is_initialized()
    runtime = start(seed=1, timeout=600, deterministic=False)
    try:
        yield Predictor(path, runtime, read)
    finally:
        if not joined:
            stop_runtime(runtime)


def of_one_process(common: dict[str, Any]) -> Config:
    """The configuration of a checkpoint's model on one process, with kernels that run there.

    The `common` of an imported model has a model section only, and the published context.
    Raises CheckpointMismatch if it is not understood.
    """
    cfg = Config()
    published = common.get("huggingface", {}).get("max_position_embeddings", _CONTEXT)
    cfg.data.sequence_length = published
    for path, value in understood(common.get("config", {})).values.items():
        if path.startswith(_SECTIONS):
            put(cfg, path, value)
    cfg.model.mtp_layers = 0
    cfg.data.micro_batch = cfg.data.global_batch = 1
    cfg.kernels.gradient_accumulation_fusion = False
    cfg.parallel.distributed_optimizer = cfg.parallel.overlap = False
    cfg.run.graph, cfg.run.save_interval = "off", -1
    return cfg


def _find_replayed(cfg: Config) -> None:
    if recorded := cfg.model.moe.router.replay:
        try:
            read_facts(recorded)
        except ValueError as error:
            remedy = "the checkpoint was trained with it (model.moe.router.replay): restore it"
            raise ConfigError(f"{error}; {remedy}") from None

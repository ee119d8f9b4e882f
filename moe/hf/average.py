"""Mean of the weights of checkpoints, or their moving averages, as a new checkpoint of weights.

One process without a GPU holds some rows of one tensor at a time. What it writes is what an import
writes: a run starts from it, and it is sampled, evaluated and exported as any other checkpoint.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from phalanx.moe.hf import ConversionError
from phalanx.moe.hf.convert import new_folder
from phalanx.moe.hf.pieces import PieceReader, PieceWriter
from phalanx.parallel.checkpoint.saved_knobs import understood
from phalanx.parallel.checkpoint.start import must_agree
from phalanx.parallel.object_store import Place

_OPTIMIZER = "optimizer."
_AVERAGE = "optimizer.state.ema."
_ELEMENTS = 16 << 20  # averaged at a time


def average(
    checkpoints: Sequence[Place],
    out: Path,
    *,
    averages: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
) -> int:
    """Write the mean of checkpoints of one model as a checkpoint of step 0 with weights alone.

    Sums are in fp64; results have the dtype of the weights. Integers, the configuration and what an
    imported model came with are those of the last checkpoint. Biases of the routers, which no
    optimizer updates, are averaged too: their mean balances experts whose weights are a mean.

    Args:
        checkpoints: folders or addresses, of any layout; all their files are verified.
        averages: take the moving averages of `optim.ema` in place of the weights, where a tensor
            has one; biases of the routers have none.
        progress: called with the number of tensors done since the last call, and of all.

    Returns:
        Number of layers whose experts have a bias.

    Raises:
        ConversionError: a checkpoint is damaged, of another model or without averages; a mean is
            NaN or infinite; or `out` exists.
        CheckpointMismatch: a configuration is not understood.
    """
    with new_folder(out) as unfinished:
        readers = [PieceReader(place, lambda done, total: None) for place in checkpoints]
        last = readers[-1]
        for place, reader in zip(checkpoints[:-1], readers[:-1], strict=True):
            _compare(place, reader, checkpoints[-1], last)
        if averages:
            for place, reader in zip(checkpoints, readers, strict=True):
                if not any(key.startswith(_AVERAGE) for key in reader.keys()):
                    raise ConversionError(
                        f"{place} has no moving averages: train with optim.ema=0.999, or leave "
                        "out --ema"
                    )
        writer, keys = PieceWriter(unfinished), _weights(last)
        for key in keys:
            for first, values in _means(readers, key, averages):
                writer.add(key, last.shape(key), first, values)
            progress(1, len(keys))
        common = {
            "config": last.common.get("config", {}),
            "step": 0,
            "data": {"consumed_samples": 0},
            "weights_only": True,
            "huggingface": last.common.get("huggingface", {}),
        }
        writer.commit(out, common)
        return sum(key.endswith("expert_bias") for key in keys)


def _weights(reader: PieceReader) -> list[str]:
    return sorted(key for key in reader.keys() if not key.startswith(_OPTIMIZER))


def _compare(place: Place, reader: PieceReader, other: Place, last: PieceReader) -> None:
    shapes, others = ({key: r.shape(key) for key in _weights(r)} for r in (reader, last))
    for key in sorted(shapes.keys() | others.keys()):
        if shapes.get(key) != others.get(key):
            here, there = (list(s[key]) if key in s else "none" for s in (shapes, others))
            raise ConversionError(
                f"{place} and {other} are of different models: {key} has shape {here} and {there}"
            )
    old, new = (understood(r.common.get("config", {})).values for r in (reader, last))
    for knob, value in old.items():
        if not knob.startswith("model.") or knob not in new:
            continue
        if value != new[knob] and must_agree(knob, value, new[knob]):
            raise ConversionError(
                f"{place} and {other} are of different models: {knob} is {value} and {new[knob]}"
            )


def _means(
    readers: Sequence[PieceReader], key: str, averages: bool
) -> Iterator[tuple[int, torch.Tensor]]:
    last = readers[-1]
    shape, dtype = last.shape(key), last.dtype(key)
    rows = max(1, _ELEMENTS // max(1, math.prod(shape[1:])))
    for first in range(0, shape[0], rows):
        part = first, min(first + rows, shape[0])
        if not dtype.is_floating_point:
            yield first, last.read(key, part)
            continue
        total = torch.zeros((part[1] - first, *shape[1:]), dtype=torch.float64)
        for reader in readers:
            held = averages and _AVERAGE + key in reader.keys()
            total += reader.read(_AVERAGE + key if held else key, part)
        mean = (total / len(readers)).to(dtype)
        if not mean.isfinite().all():
            raise ConversionError(
                f"the mean of {key} is NaN or infinite: leave that checkpoint out"
            )
        yield first, mean

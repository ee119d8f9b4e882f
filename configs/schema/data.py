"""Tokens, batches and validation."""

from dataclasses import dataclass, field

from phalanx.configs.fields import knob


@dataclass
class DataConfig:
    """Source of tokens, and batching."""

    source: str = knob("embedded", choices=("embedded", "indexed", "synthetic"))
    """`embedded` (bytes of the Python library), `indexed` (Megatron .bin/.idx) or `synthetic`.

    `embedded` and `synthetic` are for tests and benchmarks; long runs with checkpoints need
    `indexed`.
    """
    blend: list[str] = field(default_factory=list)
    """Paths of `indexed` data without .bin, or weights and paths in turn: [0.7, a, 0.3, b].

    An address of an object store (s3://bucket/prefix) is read from there (docs/data.md). Without
    weights the sources are mixed in proportion to their tokens. The start page shows tokens
    and epochs of each.
    """
    stages: list[str] = field(default_factory=list)
    """Weights of `data.blend` that change on the way: `[80e9:0.5/0.5]` from 80 billion tokens on.

    Each stage has the weight of every source, 0 for one that it does not read; the weights of
    `data.blend`, which may have a 0 then too, hold before the first. A run that resumes may change
    stages that have not begun (docs/data.md). Validation keeps the weights of `data.blend`.
    """
    split: str = "98,2"
    """Relative sizes of the training and validation parts of each source."""
    validation: list[str] = field(default_factory=list)
    """Data that `run.eval_interval` validates on in place of the validation part, as `blend` is
    written; `split=1` then trains on all of `blend`.

    Each source has its own loss, and bits per byte where the bytes of its text are known.
    """
    cache: str = ""
    """Folder of built corpora and index files; empty uses .cache/phalanx in the home folder.

    Copies of the index of addresses in `data.blend` are there as well.
    """
    sequence_length: int = knob(256, at_least=1, largest_published=10_000_000)  # Llama 4
    """Number of tokens in a sequence."""
    micro_batch: int = knob(4, at_least=1)
    """Number of sequences that a rank processes in one forward pass."""
    global_batch: int = knob(32, at_least=1)
    """Number of sequences in one optimizer step, over all ranks and micro-batches."""
    batch_warmup: list[str] = field(default_factory=list)
    """Smaller global batches at the start: `[64:1e9,128:3e9]` has 64 sequences up to a billion
    tokens, and 128 up to three.

    `data.global_batch` comes after them. The number of micro-batches changes between two steps;
    captured steps are then captured anew, which takes some seconds.
    """
    seed: int = 1234
    """Seed of the order of documents and samples."""
    document_mask: bool = False
    """Attention stops at the ends of documents, positions restart, no token predicts another text.

    Off, a token attends to all before it in its sequence, whatever document they are of.
    """
    loss_mask: bool = True
    """Labels that a loss mask beside the tokens leaves out have no loss (docs/chat.md); else all
    count."""
    max_documents: int = 0
    """Most documents of a sequence that `fa4` tells apart; 0 is a 32nd of its tokens, at least 16.

    A sequence with more ends the run with the number to set. Each takes 128 rows of scratch memory
    in the backward pass of attention. Other backends tell any number apart and ignore this.
    """

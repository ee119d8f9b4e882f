"""Length, checkpoints, capture, recomputation and reports of a run."""

from dataclasses import dataclass, field

from phalanx.configs.fields import knob
from phalanx.configs.tables.activation_memory import OFFLOAD, RECOMPUTE
from phalanx.configs.tables.trackers import TRACKERS


@dataclass
class PhaseConfig:
    """One phase of a run, an entry of `run.phases`."""

    name: str = ""  # which no other phase of the run has
    steps: int = 0  # optimizer steps of the phase; 0: those that `tokens` take
    tokens: float = 0.0  # it ends with the step that reaches them
    overrides: list[str] = field(default_factory=list)  # of this phase and those after it
    keep_schedule: bool = False  # the learning rate goes on by the schedule of the phase before
    first: int = 0  # steps of the run before the phase; not to be set
    schedule_begin: int = 0  # steps before those of the schedule; not to be set


@dataclass
class RunConfig:
    """One run: length, checkpoints, logging."""

    name: str = "default"
    """Name of the run and of its folder below `run.dir`.

    The same name continues the same run. Only one launch at a time can use a run folder.
    """
    dir: str = "runs"
    """Folder that holds the folders of all runs."""
    checkpoints: str = ""
    """Address that checkpoints go to, as in s3://bucket/runs; empty keeps them in the run folder.

    Those of a run are below `<run.checkpoints>/<run.name>`. Each rank writes its part to the run
    folder first, which then needs not be shared by hosts (docs/checkpoints.md).
    """
    steps: int = knob(100, at_least=1)
    """Number of optimizer steps of the whole run, including those before a resume."""
    phases: list[PhaseConfig] = field(default_factory=list)
    """Phases that the run goes through by itself, as for a longer context or other data at its end.

    Each has a `name`, `steps` or `tokens`, and `overrides` (docs/phases.md); `steps` of the run are
    then those of all phases.
    """
    seed: int = 1
    """Seed of the initial weights, which are the same for every layout."""
    device: str = knob("auto", choices=("auto", "cuda", "cpu"))
    """`cuda`, `cpu`, or `auto`: CUDA if the machine has a GPU."""
    recompute: list[str] = knob([], choices=(RECOMPUTE,))
    """Parts that the backward pass recomputes, as in `[norm,expert_h]`; one name needs no brackets.

    `norm`, `mla_up` (from compressed vectors to queries, keys, values), `attention`, `mlp` (dense
    and shared), `expert_h` (input of the experts' activation), `moe_act` (of `kernels=megatron`),
    `moe` or `full` layers; `none` is `[]` (docs/memory.md has what each saves and costs).
    """
    offload: list[str] = knob([], choices=(OFFLOAD,))
    """Tensors that wait in pinned host memory for the backward pass, written as `recompute` is.

    `residual` (inputs of norms), `attention` (queries, keys, values, result) and `expert_h`. Copies
    run beside other work, in captured steps too. On a CPU they are copies.
    """
    graph: str = knob("auto", choices=("auto", "off", "full_iteration"))
    """CUDA graphs: `off`, `full_iteration` for forward and backward of all micro-batches as one and
    the update as another, or `auto`.

    `auto` captures where it can; elsewhere the start page says why not. Two eager steps come first,
    and the capture takes some seconds, once and after each rerun of a step.
    """
    deterministic: bool = False
    """Use deterministic algorithms only; some operations become slower."""
    resume: str = "auto"
    """Start of a run: from scratch (`auto`, `never`), or the folder or address of a checkpoint.

    The first launch decides. A run that has checkpoints resumes from the newest one, whoever
    relaunches it; a launch that names another start is refused, unless `start_over` is set.
    """
    start_over: str = ""
    """Any word that is new to the run starts it over, once: its checkpoints are renamed to `.old`.

    It starts where `resume` says, with `auto` where it first started. Later launches with the same
    word go on from the newest checkpoint, as torchrun and Slurm repeat commands.
    """
    bad_steps: str = knob("stop", choices=("stop", "skip", "rollback"))
    """Answer to a loss or gradient that is not finite: `stop`, `skip` the step, or `rollback`.

    The update of such a step is never applied. `rollback` returns to the last checkpoint, or to the
    one that the run started from, and goes on with the data after the bad step.
    """
    max_bad_steps: int = knob(10, at_least=1)
    """Number of steps skipped in a row, or rollbacks to one checkpoint, before the run ends."""
    skip_spikes: float = 0.0
    """Skip a step whose loss or gradient norm is this many standard deviations above the mean.

    Mean and deviation are those of the last 128 accepted steps. The default of 0 skips none.
    """
    save_interval: int = knob(0, at_least=-1)
    """Number of steps between checkpoints; 0 saves only at the end, -1 never saves."""
    keep_last: int = knob(2, at_least=1)
    """Number of newest checkpoints to keep; older ones are deleted once a newer one is complete.

    The disk of the run folder needs room for one more (docs/checkpoints.md).
    """
    keep_every: int = 0
    """Also keep every checkpoint whose step is a multiple of this; 0 keeps none."""
    async_save: str = knob("auto", choices=("auto", "on", "off"))
    """Write checkpoints in the background: `on`, `off`, or `auto`, which is on with CUDA."""
    requeue_code: int = 0
    """Exit code of a rank that a signal stopped before the last step; scripts/slurm.sbatch sets 85.

    With a code other than 0 torchrun reports a failure, and with --max-restarts starts again.
    """
    log_interval: int = knob(1, at_least=1)
    """Number of steps between progress lines."""
    eval_interval: int = 0
    """Number of steps between validations; 0 turns validation off."""
    eval_batches: int = knob(8, at_least=1)
    """Number of global batches in a validation; every validation reads the same ones."""
    tasks: list[str] = field(default_factory=list)
    """Files of tasks, scored with validations and after the last step (docs/scores.md)."""
    sample_every: int = 0
    """Number of steps between samples, greedy texts that go on with the data; 0 makes none.

    Each of up to 64 tokens takes a forward pass of a micro-batch on all ranks (docs/looking.md).
    """
    dry_run: bool | str = knob(False, choices=("search", "search_precision"))
    """Print the estimated memory, traffic and step time, and exit. It needs no GPU.

    Set `parallel.world_size` to the number of ranks to estimate, if not that of `experiment`.
    `search` prints the five fastest layouts that fit, with their memory and commands: sizes of
    parallel groups, model chunks, micro-batch, recomputation, offloading and overlap, for a given
    model, batch, precision and optimizer. `search_precision` compares bf16 with FP8 too.
    """
    machine: str = "h200"
    """Cluster that `run.dry_run` assumes: a kind of GPU or a YAML file (docs/operations.md).

    Measured kinds are `h200` and `h100`, assumed ones `h800`, `h20`, `b200` and `gb200`; of `a100`
    memory alone is estimated.

    A run takes the rates of the GPU that it has, and these on a CPU or another GPU.
    """
    wandb: str = knob("off", choices=("off", "offline", "online"))
    """Weights & Biases: `off`, `offline` or `online`; a failing service never stops training."""
    trackers: list[str] = knob([], choices=tuple(TRACKERS))
    """Other services that get the numbers, as in `[tensorboard,mlflow]` (docs/operations.md).

    Servers are called in a thread, so that one that is away costs a warning and no time.
    """
    project: str = knob("phalanx", formerly="run.wandb_project")
    """Name of the project in Weights & Biases and in `run.trackers`."""
    record_routing: str = ""
    """File to which the experts that tokens choose after the last step are written; empty: none.

    `model.moe.router.replay` reads it. At most 65,536 tokens a layer are kept.
    """
    inject: list[str] = field(default_factory=list)
    """Faults to rehearse failures with, as in `nan@7,hang@9:rank1,kill@12:rank0`.

    A kind, a step and perhaps a rank: `nan` or `spike` of the gradients; `hang`, `stop`, `kill`,
    `exit`, `raise` or `term` of the process. Each happens once in a run (docs/operations.md).
    """
    allow_inject: bool = True
    """Allow `run.inject`. `run=pretrain` sets false."""
    profile: list[int] = field(default_factory=list)
    """[first, last] step that torch.profiler records on rank 0, into the run folder."""

    @property
    def schedule_begin(self) -> int:
        """Number of steps before those of the learning rate's schedule."""
        return self.phases[-1].schedule_begin if self.phases else 0

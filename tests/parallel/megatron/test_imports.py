"""Side effects of importing Megatron-Core."""

import subprocess
import sys

TRAINER = """
import logging
import sys
import torch
before = len(sys.modules)
from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.moe.run.entry
print(len(sys.modules) - before, *sorted({name.split(".")[0] for name in sys.modules}))
print("torch._dynamo" in sys.modules)
with importing_megatron():
    import megatron.core.optimizer
logging.getLogger("phalanx.x").warning("heard once")
print(len(logging.root.handlers))
import wandb  # which was only kept from Megatron-Core
"""
MOST_MODULES = 1770
"""Modules that the trainer imports beside torch's, 10 % above those of today: each takes about a
millisecond of every start."""


def test_the_trainer_imports_only_what_a_run_uses_and_leaves_the_root_logger() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules, dynamo, handlers = done.stdout.splitlines()
    number, *packages = modules.split()
    unused = {"wandb", "tensorboard", "flash_attn", "cutlass", "quack", "boto3", "fla"}
    assert not unused & set(packages)
    assert dynamo == "False"
    assert int(number) <= MOST_MODULES
    assert handlers == "0"
    assert "heard once" in done.stderr.splitlines()  # as Python prints what nobody handles

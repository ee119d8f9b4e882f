"""Side effects of importing Megatron-Core."""

import subprocess
import sys

IMPORT = """
import logging
from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import megatron.core.optimizer
logging.getLogger("phalanx.x").warning("heard once")
raise SystemExit(len(logging.root.handlers))
"""


def test_the_root_logger_is_left_without_a_handler():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "heard once" in done.stderr.splitlines()  # as Python prints what nobody handles


TRAINER = """
import sys
import torch
before = len(sys.modules)
from phalanx.parallel.megatron.imports import importing_megatron

with importing_megatron():
    import phalanx.moe.training.entry
print(len(sys.modules) - before, *sorted({name.split(".")[0] for name in sys.modules}))
print("torch._dynamo" in sys.modules)
import wandb  # which was only kept from Megatron-Core
"""
MOST_MODULES = 1770
"""Modules that the trainer imports beside torch's, 10 % above those of today: each takes about a
millisecond of every start."""


def test_the_trainer_imports_only_what_a_run_uses():
    done = subprocess.run([sys.executable, "-c", TRAINER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    modules, dynamo = done.stdout.splitlines()
    number, *packages = modules.split()
    unused = {"wandb", "tensorboard", "flash_attn", "cutlass", "quack", "boto3", "fla"}
    assert not unused & set(packages)
    assert dynamo == "False"
    assert int(number) <= MOST_MODULES

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

"""TorchDynamo in a test, where it is off in other tests on a CPU."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def compiling() -> Iterator[None]:
    """Context in which torch.compile compiles, with nothing compiled before and after."""
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    torch._dynamo.reset()
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        torch._dynamo.config.patch(disable=False),
    ):
        yield
    torch._dynamo.reset()

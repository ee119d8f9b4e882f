"""Output without what libraries say about themselves."""

import logging
import warnings


def quiet() -> None:
    """Leave out what Megatron-Core and torch say about themselves at every start of every rank."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)\b")
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)

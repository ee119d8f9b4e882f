"""Output without notices of libraries about themselves."""

import logging
import warnings


def quiet() -> None:
    """Suppress notices that Megatron-Core and torch print at every start of every rank."""
    warnings.filterwarnings("ignore", module=r"(megatron|torch|transformer_engine)\b")
    for name in ("megatron", "torch.distributed", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)

"""The release of Megatron-Core that this package patches."""

from importlib import metadata

MEGATRON_CORE = "0.19.2"  # version that pyproject.toml pins


def check_version() -> None:
    """Refuse another release, before it is imported. One that is no installed package passes.

    Raises:
        ValueError: with what to install.
    """
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        return
    if found != MEGATRON_CORE:
        raise ValueError(
            f"megatron-core {found} is installed, but its parts that are patched here are those of "
            f"{MEGATRON_CORE}: pip install megatron-core=={MEGATRON_CORE}"
        )

"""Weights from and to Hugging Face folders: DeepSeek-V3, GPT-OSS and Qwen3-MoE.

`convert` is the file to read first. No file here imports transformers.
"""


class ConversionError(ValueError):
    """A folder cannot be converted; one line names the tensor, the field or the knob."""

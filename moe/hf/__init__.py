"""Conversion of weights from and to Hugging Face folders, for the families of `families`.

Start reading at `convert`. No file here imports transformers. Unlike in Megatron-Bridge no model is
built: one process without a GPU holds a region of tensors at a time, and all names, shapes and
dtypes are compared before the first is written.
"""


class ConversionError(ValueError):
    """A folder cannot be converted; one line names the tensor, the field or the knob."""

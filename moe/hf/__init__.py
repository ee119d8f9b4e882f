"""Conversion of weights from and to Hugging Face folders, for the families of `families`.

Start reading at `convert`. No file here imports transformers.

Megatron-Bridge builds the model with its own classes and fills it, and depends on transformers and
many libraries of models. Here no model is built: one process without a GPU holds a region of
tensors at a time, all names, shapes and dtypes are compared before the first is written, and the
checkpoint is that of this trainer.
"""


class ConversionError(ValueError):
    """A folder cannot be converted; one line names the tensor, the field or the knob."""

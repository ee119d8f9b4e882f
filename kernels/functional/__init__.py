"""The expert MLP as functions of tensors, for models that are not Megatron-Core's."""

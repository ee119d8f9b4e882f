"""The model and its training: router, experts, MoE layer, GPTModel, data, metrics, the loop."""

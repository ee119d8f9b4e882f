"""Looking at what was trained: a checkpoint of any layout as a model on one process, and its text.

The model is the trainer's (`moe.training.setup.build_model`), so its logits are those of training.
"""

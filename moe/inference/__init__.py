"""Inference with a checkpoint of any layout: a model on one process, its text and its scores.

The model is the trainer's (`moe.run.setup.build_model`), so its logits are those of training.
"""

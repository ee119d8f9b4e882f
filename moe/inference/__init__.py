"""Inference with a checkpoint: the trainer's model (`moe.run.setup.build_model`) on one process."""

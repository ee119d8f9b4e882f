"""The loss of a language model in one pass over its logits."""

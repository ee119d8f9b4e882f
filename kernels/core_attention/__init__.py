"""Core attention, its rotary embeddings, and the keys of latent attention."""

"""Changes of the architecture for experiments: latent experts."""

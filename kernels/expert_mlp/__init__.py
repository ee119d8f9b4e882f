"""The expert MLP: backends, one autograd function over them, activations, modules."""

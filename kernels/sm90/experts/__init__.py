"""The kernels of the expert MLP, and the backend that they make."""

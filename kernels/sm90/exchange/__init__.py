"""The kernels that exchange rows between GPUs of a node, and their host half."""

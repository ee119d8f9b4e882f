"""Kernels of the router and of the routing plan."""

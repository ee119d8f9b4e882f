"""The kernels of the router and of the routing plan."""

"""The routing plan, where the transports look for it: `kernels.plan`."""

from kernels.plan import Plan, check_routing, make_plan

__all__ = ["Plan", "check_routing", "make_plan"]

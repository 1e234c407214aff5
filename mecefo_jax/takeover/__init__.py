"""Takeover: who computes which microbatch when nodes are dead, how exactly, and at what cost (NumPy only)."""

from mecefo_jax.takeover.cost import degraded_costs, scaled_costs
from mecefo_jax.takeover.plan import Plan, make_plan, stage_of_layers

__all__ = ["Plan", "degraded_costs", "make_plan", "scaled_costs", "stage_of_layers"]

"""Plans the memory of servers on paper: a replay by counts alone, of many servers at once."""

from swa_jax.planner.limits import Limits, stack_limits, two_pools
from swa_jax.planner.loads import Load, deal, same_for_all
from swa_jax.planner.planning import Plan, PlanSettings, plan_split
from swa_jax.planner.simulate import Figures, SimShape, simulate

__all__ = [
    "Figures",
    "Limits",
    "Load",
    "Plan",
    "PlanSettings",
    "SimShape",
    "deal",
    "plan_split",
    "same_for_all",
    "simulate",
    "stack_limits",
    "two_pools",
]

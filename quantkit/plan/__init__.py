"""What a recipe will do to every tensor of a model, decided before any weight is read."""

from quantkit.plan.make_plan import LayerPlan, OutputPlan, Plan, make_plan

__all__ = ["LayerPlan", "OutputPlan", "Plan", "make_plan"]

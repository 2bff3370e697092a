"""Which scheme each layer gets when the recipe gives a size: measured sensitivities and an exact knapsack."""

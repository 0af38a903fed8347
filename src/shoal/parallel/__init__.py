"""How a plan is applied: one folder per technique."""

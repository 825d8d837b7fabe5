"""Who computes what in the next step. Pure Python: tested without a model."""

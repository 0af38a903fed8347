"""Tensor parallelism: weights and activations divided among the ranks of one group, for plain models."""

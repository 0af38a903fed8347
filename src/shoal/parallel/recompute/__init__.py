"""Recompute: activations of blocks are computed anew in backward instead of kept."""

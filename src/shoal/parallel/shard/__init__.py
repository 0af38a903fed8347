"""Weights, gradients and optimizer state in shards over the ranks; torch's FSDP2 underneath."""

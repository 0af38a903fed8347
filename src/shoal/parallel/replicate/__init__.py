"""Data parallel: whole weights on every rank, gradients summed in buckets while backward runs."""

"""Reference models in plain torch, written without a thought of parallelism."""

from shoal.models.gpt import GPT
from shoal.models.vit import ViT

__all__ = ["GPT", "ViT"]

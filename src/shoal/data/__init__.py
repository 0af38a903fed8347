"""Which samples a step reads (order), from where (sources), and how they arrive (loader)."""

from shoal.data.loader import Windows, eval_micro_batches
from shoal.data.order import Order, cut
from shoal.data.window import DataSettings, MicroBatch, Window

__all__ = ["DataSettings", "MicroBatch", "Order", "Window", "Windows", "cut", "eval_micro_batches"]

"""Short runs with a gradient codec on small models, whose matrices are all large enough for it here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from tests.small_jobs import LM, job, sgd, start, token_loss, token_rows
from torch import Tensor

from shoal.compress import ERROR
from shoal.engine.run import Run
from shoal.plan import codec

CODECS = ("bf16", "int8", "topk:0.1", "powersgd:2")
KEEPING = CODECS[1:]  # those with errors


def tiny() -> None:
    """Weights of any size are carried from here on: in a forked rank, or under a patch that ends."""
    codec.SMALLEST = 1


def coded(out: Path, compress: str | None, steps: int, tell: Callable[[str], None] = lambda text: None, **more) -> Run:
    """A run of a small language model in buckets of a few hundred numbers. Collective."""
    tiny()
    given = {"model": LM, "data": token_rows([12] * 48), "loss": token_loss, "optimizer": sgd(0.3)}
    given |= {name: more.pop(name) for name in list(more) if name in given}
    settings = {"global_batch": 8, "micro_batch": 2, "bucket_mb": 0.002, "compress": compress, **more}
    return start(job(**given), out, tell, steps=steps, **settings)


def stepped(run: Run) -> Iterator[float]:
    """The loss of each step, once it was taken."""
    for window in run.windows():
        yield run.step(window).loss


def digest(run: Run) -> str:
    """Of all bytes of the weights and of the last step's summed gradients."""
    tensors = [*run.model.state_dict().values(), *(bucket.flat for bucket in run.buckets.buckets)]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def errors(run: Run) -> dict[str, Tensor]:
    """Copies of what this rank has not sent, by parameter."""
    return {name: tensor.clone() for (key, name), tensor in kept(run).items() if key == ERROR}


def kept(run: Run) -> dict[tuple[str, str], Tensor]:
    """What the run's codec keeps."""
    assert run.buckets.codec is not None
    return run.buckets.codec.memory.kept


def summed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Over all ranks. Collective."""
    for tensor in tensors.values():
        dist.all_reduce(tensor)
    return tensors


def same(a: dict, b: dict) -> bool:
    """Bitwise."""
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)

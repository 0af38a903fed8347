"""The settings of a run: what the command line and the Python calls share."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from shoal.core.settings import Settings
from shoal.plan.plan import Precision, Recompute
from shoal.plan.schedule import ScheduleName


class RunSettings(Settings):
    """How a job is run. Each field is a flag of ``shoal train``; its description is the flag's help."""

    model_config = ConfigDict(allow_inf_nan=False)

    steps: int | None = Field(
        None, ge=1, description="optimizer steps to take in all (default: by --epochs; with both, what ends first)"
    )
    epochs: int | None = Field(None, ge=1, description="passes over the data (default: 1 if no --steps)")
    global_batch: int = Field(32, ge=1, description="samples in one optimizer step, over all workers")
    micro_batch: int | None = Field(
        None,
        ge=1,
        description="samples per worker in one forward and backward (default: global batch / workers)",
    )
    mesh: str | None = Field(
        None, description="ranks along axes, such as pipeline=2,tensor=2 (default: all workers replicate)"
    )
    plan: str | None = Field(None, description="a plan's file, in place of --mesh and what goes with it")
    schedule: ScheduleName | None = Field(
        None, description="pipeline schedule (default: 1f1b, gpipe where micro-batches are few)"
    )
    chunks: int = Field(1, ge=1, description="pipeline stages that each rank holds")
    sequence_parallel: bool = Field(
        False, description="between tensor regions, each rank of the tensor axis keeps its positions of the sequences"
    )
    shard_level: Literal[1, 2, 3] = Field(
        3, description="what the shard axis divides: 1 optimizer, 2 also gradients, 3 also weights outside of their use"
    )
    recompute: Recompute = Field("none", description="activations computed anew in backward instead of kept")
    cpu_offload: bool = Field(False, description="keep sharded weights, gradients and optimizer in host memory")
    precision: Precision = Field("fp32", description="compute precision; weights and optimizer stay float32")
    clip: float | None = Field(None, gt=0, description="largest global gradient norm (default: no clipping)")
    lr_scaling: Literal["none", "linear"] = Field(
        "none", description="linear: the job's learning rates times global batch / base batch; none: as the job says"
    )
    base_batch: int | None = Field(
        None, ge=1, description="global batch that the job's learning rates are meant for (with --lr-scaling linear)"
    )
    seed: int = Field(0, ge=0, description="seed of weights, data order and randomness")
    out: str = Field("runs/{job}", description="the run's folder")
    resume: bool = Field(False, description="go on from the newest good checkpoint in --out")
    init_from: str | None = Field(
        None, description="take weights alone from a run, a checkpoint, or safetensors (a file or a model's folder)"
    )
    eval_every: int | None = Field(None, ge=1, description="steps between evaluations (default: at the end)")
    save_every: int | None = Field(None, ge=1, description="steps between checkpoints (default: at the end)")
    keep: int = Field(2, ge=1, description="checkpoints to keep")
    loader_workers: int = Field(0, ge=0, description="processes that read data, per worker")
    short_windows: Literal["use", "drop", "pad"] = Field(
        "use", description="the last, shorter batch of an epoch; pad: filled with the epoch's first samples once more"
    )
    compile: bool = Field(False, description="compile the model with torch.compile")
    ema: float | None = Field(None, gt=0, lt=1, description="decay of averaged weights (default: none)")
    kernels: Literal["auto", "default"] = Field(
        "auto", description="auto: the fastest float32 matrix product whose error is float32's, if it gains"
    )
    max_skips: int = Field(10, ge=1, description="steps skipped in a row before the run stops")
    debug_collectives: bool = Field(
        False, description="check that all workers make the same collective calls; slow, for finding hangs"
    )
    bucket_mb: float = Field(25.0, gt=0, description="size of a gradient bucket, MB")
    compress: str | None = Field(
        None, description="codec in which gradients travel: none, bf16, int8, topk:SHARE or powersgd:RANK"
    )
    sinks: tuple[str, ...] = Field(("tensorboard",), description="where else events go")

    def contradictions(self) -> list[str]:
        """Settings that are good alone but not together."""
        found = []
        if self.lr_scaling == "linear" and self.base_batch is None:
            found.append(
                "lr_scaling linear was asked for without base_batch; "
                "add --base-batch N, the global batch that the job's rates are for"
            )
        if self.lr_scaling == "none" and self.base_batch is not None:
            found.append(f"base_batch {self.base_batch} without lr_scaling does nothing; add --lr-scaling linear")
        return found

    @property
    def lr_factor(self) -> float:
        """What the job's base rates are multiplied by: 1, or global batch / base batch."""
        return self.global_batch / self.base_batch if self.lr_scaling == "linear" and self.base_batch else 1.0


#: Settings that may differ when a run is resumed; any other must be as it was.
MAY_CHANGE = frozenset(
    {
        "steps", "epochs", "micro_batch", "out", "resume", "init_from", "eval_every", "save_every", "keep",
        "loader_workers", "max_skips", "bucket_mb", "compress", "sinks", "clip", "compile", "debug_collectives",
        "mesh", "plan", "schedule", "chunks", "sequence_parallel", "shard_level", "recompute", "cpu_offload",
    }
)  # fmt: skip

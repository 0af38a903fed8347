"""What a user writes: a Job and, where it is not a plain mean, a Loss."""

from shoal.job.job import Job
from shoal.job.loss import Loss

__all__ = ["Job", "Loss"]

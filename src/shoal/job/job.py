"""The Job: model, data, loss and optimizer in plain PyTorch; typed fields with defaults are its settings."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.core.errors import ConfigError, DataError
from shoal.core.fields import faults_of, fill


class Job(BaseModel):
    """What to train. Subclass it in one Python file; annotated class fields with defaults become settings.

    ``model``, ``data``, ``loss`` and ``optimizer`` must be written; the rest have defaults. A batch is a pair
    (inputs, targets): inputs is a tensor, a tuple (positional) or a dict (keywords), passed to the model as such.

    A field may hold named values itself (a pydantic model, a dataclass, a dict): what is given for it is merged onto
    its default. Making a job raises ConfigError naming every field that is unknown or of the wrong type.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), validate_default=True)

    def __init__(self, /, **values: Any) -> None:
        where = type(self).__name__
        ready, faults = fill(type(self), values, where)
        try:
            super().__init__(**ready)
        except ValidationError as error:
            faults += faults_of(error, type(self), where, skip=values.keys() - ready.keys())
        if faults:
            raise ConfigError("\n".join(faults)) from None

    def model(self) -> Any:
        """The ``nn.Module`` to train. Called under the run's seed on every rank."""
        raise NotImplementedError

    def init_from(self) -> Any:
        """Weights to begin from where the run names none (``--init-from``): a run, a checkpoint, a safetensors file, a
        model's folder of them. None: those that ``model()`` gives."""
        return None

    def data(self) -> Any:
        """The training data: any map-style or iterable ``torch.utils.data.Dataset``, or a Hugging Face one."""
        raise NotImplementedError

    def loss(self, output: Any, targets: Any) -> Any:
        """``shoal.Loss(sum, count)``, or a scalar: then a mean over the micro-batch's samples."""
        raise NotImplementedError

    def counts(self, inputs: Any, targets: Any) -> dict[str, Any] | None:
        """The count of each term of a loss of several terms, by name; None: the loss has one term.

        The step's loss is then the sum over terms of (sum of its sums) / (sum of its counts) over the global batch, and
        ``loss`` returns {term: sum}, each a scalar tensor, with the same names. A term without any item counts as 0.
        """
        return None

    def optimizer(self, model: Any) -> Any:
        """Any ``torch.optim`` optimizer over the model's named parameters."""
        raise NotImplementedError

    def lr_schedule(self, optimizer: Any, steps: Any) -> Any:
        """None (constant), a function step -> factor of the base rate, or a ``torch.optim.lr_scheduler``.

        ``steps`` is the number of optimizer steps the run will take; schedules count these and nothing else. It is
        None where iterable data does not tell its length and no steps were asked for.
        """
        return None

    def eval_data(self) -> Any:
        """Held-out map-style data; each sample is counted exactly once. None: no evaluation."""
        return None

    def metrics(self, output: Any, targets: Any) -> dict[str, Any]:
        """Further evaluation figures by name, each a ``shoal.Loss(sum, count)`` over the micro-batch."""
        return {}

    def collate(self, samples: list[Any]) -> Any:
        """Samples to a batch. None of ours is better than torch's default for equal shapes; pad here otherwise."""
        raise NotImplementedError

    def inputs(self, batch: Any) -> tuple[Any, Any]:
        """Split a batch into (inputs, targets)."""
        if not (isinstance(batch, tuple | list) and len(batch) == 2):
            found = f"{len(batch)} parts" if isinstance(batch, tuple | list) else f"a {type(batch).__name__}"
            raise DataError(
                f"a batch should be a pair (inputs, targets), found {found}; return pairs from the data set, or write "
                "inputs(batch) in the job to make them"
            )
        inputs, targets = batch
        return inputs, targets

    def after(self, model: Any, summary: Any) -> None:
        """Called once on rank 0 when the run has ended well, with the trained model: print samples, and so on."""
        return

"""The event files of a run: ``OUT/events/rank-RRRRR.jsonl``, one flat JSON object per line.

Every row has ``kind`` and ``time`` (seconds since 1970). A *step* row is written once per optimizer step on
every rank and is the only kind that has both ``loss`` and ``grad_norm``:

    step, epoch, loss, grad_norm, lr, count, step_s, data_wait_s, forward_backward_s, sync_exposed_s,
    optimizer_s, checkpoint_stall_s, other_s, memory_bytes, samples, tokens, padded_tokens

``loss``, ``count``, ``samples`` and the tokens are of the whole global batch. Three numbers of tokens have three
names: ``padded_tokens`` are all positions, ``tokens`` those that the inputs' ``attention_mask`` keeps (all, without
one), ``count`` those that the loss counted; the first two are null where the data has none.
The parts between ``data_wait_s`` and ``other_s`` do not overlap and add up to ``step_s``.

The other kinds: *run* (the record of an attempt), *eval* (step, loss, metrics.NAME), *checkpoint* (step,
seconds), *skip* (step, reason), *note* (text), *end* (step, reason).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

Kind = Literal["run", "step", "eval", "checkpoint", "note", "skip", "end"]


class EventLog:
    """One rank's event file under the run folder ``out``; opened with the first row, never buffered.

    A row that cannot be written (a full disk) does not stop training: it is counted in ``lost`` and the
    reason is kept in ``problem`` for whoever reports to the user.
    """

    def __init__(self, out: Path, rank: int) -> None:
        self.path = event_file(out, rank)
        self.lost = 0
        self.problem: str | None = None
        self._file: int | None = None
        self._torn = False

    def row(self, kind: Kind, **values: Any) -> dict[str, Any]:
        """Write one row and return it as written: mappings flattened with dots, NaN and infinity as null.

        A null that stands for such a number comes with its text beside it: ``loss=nan`` gives ``"loss": null,
        "loss_text": "nan"``.
        """
        row: dict[str, Any] = {"kind": kind, "time": time.time()}
        _flatten(values, "", row)
        line = json.dumps(row, allow_nan=False, separators=(", ", ": ")) + "\n"
        try:
            self._append(line.encode())
        except OSError as error:
            self.lost += 1
            self.problem = f"{self.lost} event row(s) could not be written to {self.path}: {error.strerror or error}"
        return row

    def close(self) -> None:
        """Close the file; a later row opens it again."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._torn = _ends_torn(self.path)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        data = b"\n" + line if self._torn else line
        self._torn = True  # until the whole line is known to be there
        done = 0
        while done < len(data):
            done += os.write(self._file, data[done:])
        self._torn = False


def event_file(out: Path, rank: int) -> Path:
    """Where the rows of ``rank`` are; rank 0's name sorts first."""
    return Path(out) / "events" / f"rank-{rank:05d}.jsonl"


def read_events(out: Path, rank: int = 0, kind: Kind | None = None) -> Iterator[dict[str, Any]]:
    """The rows of one rank in order, of one ``kind`` if given; lines torn by a crash are no rows."""
    path = event_file(out, rank)
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            row = _parse(line)
            if row is not None and kind in (None, row.get("kind")):
                yield row


def cut_back(out: Path, step: int) -> int:
    """Drop the rows after ``step`` and torn lines from every rank's file; returns how many lines went.

    For resuming from the checkpoint of ``step``, so that each step is in the files once. Rows without a step
    (run, note) stay. Call it in one process, before any rank writes a row.
    """
    return sum(_cut_file(path, step) for path in sorted((Path(out) / "events").glob("rank-*.jsonl")))


def _cut_file(path: Path, step: int) -> int:
    dropped = 0
    beside = path.with_suffix(".partial")
    with path.open("rb") as source, beside.open("wb") as target:
        for line in source:
            row = _parse(line)
            if row is None or (isinstance(row.get("step"), int) and row["step"] > step):
                dropped += 1
            else:
                target.write(line)
        target.flush()
        os.fsync(target.fileno())
    if dropped:
        os.replace(beside, path)
    else:
        beside.unlink()
    return dropped


def _parse(line: bytes) -> dict[str, Any] | None:
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _ends_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _flatten(values: Mapping[str, Any], prefix: str, into: dict[str, Any]) -> None:
    for name, value in values.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping):
            _flatten(value, f"{key}.", into)
            continue
        value = _plain(value)
        if isinstance(value, float) and not math.isfinite(value):
            into[key], into[f"{key}_text"] = None, str(value)
        else:
            into[key] = value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return float(value) if isinstance(value, float) else value
    if isinstance(value, (list, tuple)):
        items = [_plain(item) for item in value]
        return [str(item) if isinstance(item, float) and not math.isfinite(item) else item for item in items]
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", 0) == 0:
        return _plain(value.item())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return str(value)

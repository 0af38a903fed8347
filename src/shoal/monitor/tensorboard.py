"""The TensorBoard sink: scalars and the run's record as event files under ``OUT/tensorboard``.

The files are written here, in TensorBoard's record format, with its protocol buffers alone: importing those
takes an eighth of the time of torch's or TensorBoard's own writer.
"""

# pyright: reportAttributeAccessIssue=false
# (the names of generated protocol buffers exist only once they are imported)

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.compat.proto.types_pb2 import DT_STRING

NOT_CURVES = frozenset({"kind", "time", "step"})
FLUSH_EVERY_S = 5.0


class TensorBoard:
    """Writes every number of a step or eval row as a scalar ``step/NAME`` or ``eval/NAME``.

    A resumed run adds a file that tells TensorBoard to forget the steps after the one it resumes from.
    """

    def __init__(self) -> None:
        self._file: BinaryIO | None = None
        self._flushed_s = 0.0

    def start(self, record: dict[str, Any]) -> None:
        """Open a new event file under the record's ``out``."""
        folder = Path(record["out"]) / "tensorboard"
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / _file_name(folder)).open("wb")
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        step = record.get("step") or 0
        if step:
            forget = SessionLog(status=SessionLog.START)
            self._write(Event(wall_time=time.time(), step=step + 1, session_log=forget))
        self._write(Event(wall_time=time.time(), step=step, summary=Summary(value=[_text("run", record)])))
        self._flush()

    def row(self, row: dict[str, Any]) -> None:
        """Write the numbers of a step or eval row; other kinds are passed over."""
        if row["kind"] not in ("step", "eval"):
            return
        values = [Summary.Value(tag=f"{row['kind']}/{name}", simple_value=x) for name, x in _numbers(row)]
        self._write(Event(wall_time=row["time"], step=row["step"], summary=Summary(value=values)))
        if row["kind"] == "eval" or time.monotonic() - self._flushed_s > FLUSH_EVERY_S:
            self._flush()

    def close(self) -> None:
        """Write what is left and close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, event: Event) -> None:
        if self._file is not None:
            self._file.write(as_record(event.SerializeToString()))

    def _flush(self) -> None:
        if self._file is not None:
            self._file.flush()
        self._flushed_s = time.monotonic()


def as_record(data: bytes) -> bytes:
    """``data`` in the TFRecord format: length, its masked CRC-32C, data, its masked CRC-32C, little-endian.

    From https://www.tensorflow.org/tutorials/load_data/tfrecord ("TFRecords format details").
    """
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _masked_crc(length)), data, struct.pack("<I", _masked_crc(data))))


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _crc_table() -> tuple[int, ...]:
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)  # Castagnoli's polynomial, reflected
        table.append(crc)
    return tuple(table)


_CRC_TABLE = _crc_table()


def _file_name(folder: Path) -> str:
    attempt = sum(1 for _ in folder.glob("events.out.tfevents.*"))  # files are read in the order of their names
    return f"events.out.tfevents.{int(time.time()):010d}.{attempt:05d}.{socket.gethostname()}.{os.getpid()}"


def _numbers(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if name in NOT_CURVES or isinstance(value, bool):
            continue
        if value is None and f"{name}_text" in row:
            value = float(row[f"{name}_text"])  # NaN or infinity, which TensorBoard marks as such
        if isinstance(value, (int, float)):
            yield name.replace(".", "/"), value


def _text(tag: str, record: dict[str, Any]) -> Summary.Value:
    lines = ["| field | value |", "|---|---|", *(f"| {name} | `{value}` |" for name, value in record.items())]
    text = TensorProto(
        dtype=DT_STRING,
        string_val=["\n".join(lines).encode()],
        tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
    )
    shown_as = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return Summary.Value(tag=tag, metadata=shown_as, tensor=text)

"""How a checkpoint lies on disk: safetensors bodies, and JSON that carries its own checksum.

The safetensors format: https://huggingface.co/docs/safetensors (8 bytes length, JSON header, dense tensors).
"""

from __future__ import annotations

import json
import math
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import CheckpointError

FORMAT = 1
MANIFEST = "MANIFEST.json"
STEP_NAME = re.compile(r"step-(\d+)")
REPLACED_NAME = re.compile(r"step-(\d+)\.replaced")  # made way for a new one of its name; good until that one is
CHUNK_BYTES = 4 << 20
HEADER_LIMIT_BYTES = 100 << 20  # safetensors' own limit

Shape = tuple[int, ...]

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises CheckpointError where the format has none."""
    if dtype not in DTYPE_NAMES:
        raise CheckpointError(
            f"cannot save {name!r}: a checkpoint cannot hold {dtype}, only {', '.join(sorted(DTYPES))}; "
            "store it as one of these, or keep it out of the state (persistent=False)"
        )
    return DTYPE_NAMES[dtype]


def size_bytes(shape: Shape, dtype: torch.dtype) -> int:
    """Bytes of a dense tensor."""
    return math.prod(shape) * dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A safetensors file before it is written: its header, and where in the body each tensor lies."""

    header: bytes
    spans: dict[str, tuple[int, int]]  # in bytes from the body's start
    body_bytes: int

    @property
    def file_bytes(self) -> int:
        """Size of the whole file."""
        return len(self.header) + self.body_bytes


def plan_file(tensors: Mapping[str, tuple[Shape, torch.dtype]], metadata: Mapping[str, str]) -> Layout:
    """Place tensors without gaps, wide dtypes first so that each is aligned to its own size."""
    order = sorted(tensors, key=lambda name: (-tensors[name][1].itemsize, name))
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    spans = {}
    at = 0
    for name in order:
        shape, dtype = tensors[name]
        end = at + size_bytes(shape, dtype)
        spans[name] = (at, end)
        kind = dtype_name(name, dtype)
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return Layout(len(text).to_bytes(8, "little") + text, spans, at)


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """A safetensors file's entries and where its body starts. Raises CheckpointError on anything else."""
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT_BYTES):
            raise CheckpointError(f"{path} is no safetensors file: its header would end beyond its {size} bytes")
        text = file.read(length)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no safetensors file: its header is not JSON ({error})") from None
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path} is no safetensors file: its header is no JSON object")
    return entries, 8 + length


def file_checksum(path: Path) -> int:
    """zlib.crc32 of a file, read in chunks."""
    checksum = 0
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
    return checksum


def _seal_prefix(checksum: int) -> bytes:
    return b'{"crc32":"%08x","body":' % checksum


def seal(body: Any) -> bytes:
    """JSON of ``{"crc32": ..., "body": body}``, the checksum over the body's own bytes."""
    text = json.dumps(body, separators=(",", ":")).encode()
    return _seal_prefix(zlib.crc32(text)) + text + b"}"


def unseal(path: Path) -> Any:
    """The body of a sealed JSON file. Raises CheckpointError where it changed, OSError where unreadable."""
    raw = path.read_bytes()
    text = raw[len(_seal_prefix(0)) : -1]
    if raw != _seal_prefix(zlib.crc32(text)) + text + b"}":
        raise CheckpointError(f"{path.name} is torn or changed: its checksum does not match its {len(raw)} bytes")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} is not JSON ({error})") from None

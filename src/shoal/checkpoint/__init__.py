"""What is saved of a run: written in the background, found again whole, exported for others."""

from shoal.checkpoint.export import export, list_checkpoints, verify_checkpoints
from shoal.checkpoint.pieces import Part, Piece
from shoal.checkpoint.reader import Found, Reader, checkpoints, compare, newest_good
from shoal.checkpoint.writer import Writer

__all__ = [
    "Found",
    "Part",
    "Piece",
    "Reader",
    "Writer",
    "checkpoints",
    "compare",
    "export",
    "list_checkpoints",
    "newest_good",
    "verify_checkpoints",
]

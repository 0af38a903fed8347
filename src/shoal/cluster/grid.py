"""What a measurement looks at: shapes, sizes, and how long it may take."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from shoal.core.settings import Settings

KIB, MIB = 2**10, 2**20
#: Sizes (m, k, n) of matrix products whose other precisions are looked at too.
CORNERS = ((256, 256, 256), (1024, 256, 1024), (512, 1024, 1024))


class Grid(Settings):
    """Shapes and sizes, from the smallest up; ``budget_s`` is shared out among them."""

    main_precision: str = Field(description="whose products are measured at every shape")
    products: tuple[tuple[int, int, int], ...] = Field(description="(m, k, n) of products")
    precisions: tuple[str, ...] = Field(description="measured at the corners")
    corners: tuple[tuple[int, int, int], ...] = Field(description="(m, k, n) for all precisions")
    stream_bytes: tuple[int, ...] = Field(description="bytes that an element-wise operation reads and writes")
    smallest_bytes: int = Field(default=KIB, ge=64, description="of a collective's buffer")
    largest_bytes: int = Field(default=256 * MIB, description="of a collective's buffer; less over slow links")
    sizes: int = Field(default=10, ge=2, description="buffers from the smallest to the largest")
    attentions: tuple[tuple[int, int, int, int], ...] = Field(description="batch, heads, positions, width")
    function: tuple[int, int] = Field(default=(1024, 512), description="rows and width of element-wise functions")
    optimizer_numel: int = Field(default=8 * MIB, description="parameters of the measured optimizer step")
    disk_bytes: int = Field(default=128 * MIB, description="written and synced")
    budget_s: float = Field(default=40.0, gt=0, description="for all of it, about")


def grid(kind: Literal["cpu", "cuda"]) -> Grid:
    """The usual one for a kind of device."""
    if kind == "cuda":
        return Grid(
            main_precision="bf16",
            products=tuple(
                (m, k, n) for m in (128, 512, 2048, 8192) for k in (128, 1024, 8192) for n in (128, 1024, 8192)
            ),
            precisions=("fp32", "fp16", "fp64"),
            corners=((512, 512, 512), (2048, 2048, 2048), (4096, 4096, 4096)),
            stream_bytes=tuple(3 * 4**step * 16 * KIB for step in range(8)),
            attentions=((16, 16, 512, 64), (4, 16, 2048, 128)),
            function=(16384, 4096),
            optimizer_numel=128 * MIB,
            disk_bytes=1024 * MIB,
        )
    return Grid(
        main_precision="fp32",
        products=tuple(
            (m, k, n) for m in (16, 64, 256, 1024) for k in (32, 128, 512, 1024) for n in (32, 128, 512, 1024)
        ),
        precisions=("fp64", "bf16", "fp16"),
        corners=CORNERS,
        stream_bytes=tuple(3 * 4**step * 4 * KIB for step in range(8)),
        attentions=((16, 4, 64, 32), (4, 4, 256, 32), (16, 4, 64, 64), (4, 4, 256, 64), (1, 4, 1024, 64)),
    )


def quick(kind: Literal["cpu", "cuda"]) -> Grid:
    """A grid of a second or two, for a run that would else know nothing of its machine."""
    usual = grid(kind)
    shapes = ((64, 64, 64), (256, 256, 256), (1024, 256, 1024), (512, 1024, 1024))
    return usual.model_copy(
        update={
            "products": shapes, "precisions": (), "corners": (), "stream_bytes": usual.stream_bytes[2::3],
            "largest_bytes": 4 * MIB, "sizes": 3, "optimizer_numel": MIB, "disk_bytes": MIB, "budget_s": 1.0,
        }
    )  # fmt: skip

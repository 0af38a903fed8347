"""Which float32 matrix product this CPU runs fastest at float32's own accuracy: measured, not assumed."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

SHAPE = (256, 384, 768)  # M, K, N: large enough to show the kernel's rate, about 2 ms
NAMES = ("highest", "medium")  # torch's names; "high" takes the default's kernel on CPU
GAIN = 1.2  # another kernel than the default must be that much faster: it changes rounding
ERROR_FACTOR = 4.0  # a kernel counts as float32 while its error is at most this many times the default's


def measure(rounds: int = 8) -> dict[str, dict[str, float]]:
    """Milliseconds and relative error (against float64) of a float32 product, per matmul precision of torch.

    The names take turns and the least processor time counts, so that a busy machine does not decide.
    """
    m, k, n = SHAPE
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator)
    b = torch.randn(k, n, generator=generator)
    exact = a.double() @ b.double()
    before = torch.get_float32_matmul_precision()
    found = {name: {"ms": math.inf, "error": 0.0} for name in NAMES}
    for _ in range(rounds):
        for name, entry in found.items():
            torch.set_float32_matmul_precision(name)
            start = time.process_time()
            product = torch.mm(a, b)
            entry["ms"] = min(entry["ms"], round((time.process_time() - start) * 1e3, 3))
            entry["error"] = float((product.double() - exact).norm() / exact.norm())
    torch.set_float32_matmul_precision(before)
    return found


def choose(measured: dict[str, dict[str, float]]) -> str:
    """The fastest precision name whose error stays at float32's level; the default unless another gains enough."""
    bound = measured["highest"]["error"] * ERROR_FACTOR
    exact = {name: entry for name, entry in measured.items() if entry["error"] <= bound}
    fastest = min(exact, key=lambda name: exact[name]["ms"])
    return fastest if measured["highest"]["ms"] >= GAIN * exact[fastest]["ms"] else "highest"


def select(setting: str, device_type: str, saved: dict[str, Any] | None) -> dict[str, Any]:
    """The choice as a record: what and why. A resumed run keeps its kernels, so that resuming stays bitwise."""
    if saved is not None:
        return saved
    if setting == "default" or device_type != "cpu":
        return {
            "float32_matmul": "highest",
            "why": "torch's default, as asked" if setting == "default" else device_type,
        }
    measured = measure()
    name = choose(measured)
    told = ", ".join(f"{key} {entry['ms']} ms, error {entry['error']:.1e}" for key, entry in measured.items())
    why = "fastest at float32 accuracy" if name != "highest" else f"no other gains {GAIN} times at float32 accuracy"
    return {"float32_matmul": name, "why": f"{why} ({told})"}

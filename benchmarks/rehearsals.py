"""Is the peak per rank that a plan foretells the one that a rehearsal of the engine's own code counts?

python benchmarks/rehearsals.py [--json] [NAME ...]     a row for each (model, layout) cell; all of them: minutes

Each cell rehearses the first and the last pipeline stage's rank; its error is the larger of the two.
"""

import json
import sys
import time
from pathlib import Path

import torch

from shoal.verify.rehearsal import rehearse

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
#: Model: file, fields.
MODELS = {
    "llama": ("hf_llama.py", {"layers": 8, "width": 128, "heads": 8, "kv_heads": 8, "context": 64}),
    "llama-16": ("hf_llama.py", {"layers": 16, "width": 64, "heads": 8, "kv_heads": 8, "context": 32}),
    "gpt": ("gpt.py", {"layers": 8, "width": 128, "heads": 8, "context": 64}),
    "vit": ("vit.py", {"layers": 8, "width": 64, "heads": 4}),
}
#: Mesh, micro-batch, accumulation, other settings.
LAYOUTS = {
    "replicate 2": ("replicate=2", 4, 1, {}),
    "replicate 2, 4": ("replicate=2", 2, 4, {}),
    "replicate 8, full": ("replicate=8", 4, 1, {"recompute": "full"}),
    "replicate 64, bf16": ("replicate=64", 4, 1, {"precision": "bf16"}),
    "shard 2": ("shard=2", 4, 1, {}),
    "shard 2, level 2, 2": ("shard=2", 2, 2, {"shard_level": 2}),
    "shard 2, level 1, 2": ("shard=2", 2, 2, {"shard_level": 1}),
    "shard 16, full": ("shard=16", 4, 1, {"recompute": "full"}),
    "shard 64, bf16": ("shard=64", 4, 1, {"precision": "bf16"}),
    "tensor 2": ("tensor=2", 4, 1, {}),
    "tensor 4, sequence": ("tensor=4", 4, 1, {"sequence_parallel": True}),
    "gpipe 4": ("pipeline=4", 2, 8, {"schedule": "gpipe"}),
    "1f1b 4": ("pipeline=4", 2, 8, {"schedule": "1f1b"}),
    "1f1b 8, full": ("pipeline=8", 2, 16, {"schedule": "1f1b", "recompute": "full"}),
    "interleaved 4": ("pipeline=4", 2, 8, {"schedule": "interleaved-1f1b", "chunks": 2}),
    "zbv 4": ("pipeline=4", 2, 8, {"schedule": "zbv", "chunks": 2}),
    "hybrid 32": ("replicate=8,shard=4", 2, 1, {}),
    "shard x tensor 8": ("shard=4,tensor=2", 4, 1, {}),
    "textbook 64": ("pipeline=8,replicate=4,tensor=2", 2, 8, {"schedule": "1f1b"}),
    "pipeline x shard 32": ("pipeline=4,shard=8", 2, 4, {"schedule": "1f1b"}),
    "1,024": ("pipeline=8,replicate=32,tensor=4", 2, 8, {"schedule": "1f1b"}),
    "1,024 sharded": ("pipeline=4,replicate=4,shard=16,tensor=4", 1, 4, {"schedule": "1f1b"}),
    "256 sharded": ("replicate=8,shard=32", 2, 1, {}),
    "512, full, bf16": ("replicate=4,shard=64,tensor=2", 2, 1, {"recompute": "full", "precision": "bf16"}),
}


def cell(model: str, layout: str) -> dict:
    """Peaks of the first and last stage, counted and foretold."""
    file, fields = MODELS[model]
    mesh, micro, accumulation, more = LAYOUTS[layout]
    degrees = dict(part.split("=") for part in mesh.split(","))
    data = int(degrees.get("replicate", 1)) * int(degrees.get("shard", 1))
    world, stages = 1, int(degrees.get("pipeline", 1))
    for degree in degrees.values():
        world *= int(degree)
    first_and_last = sorted({0, world // stages * (stages - 1)})
    found = rehearse(
        str(EXAMPLES / file), fields=fields, mesh=mesh, micro_batch=micro, global_batch=micro * accumulation * data,
        ranks=",".join(map(str, first_and_last)), **more,
    )  # fmt: skip
    worst = max(found.ranks, key=lambda each: abs(each.memory_error or 0.0))
    return {
        "model": model, "layout": layout, "mesh": mesh, "world": world, "rank": worst.rank,
        "counted": worst.counted.peak_bytes, "foretold": worst.said.memory.total_bytes, "error": worst.memory_error,
        "moment": worst.said.memory.moment, "memory": dict(worst.counted.memory),
        "said": worst.said.memory._asdict(),
    }  # fmt: skip


def main() -> None:
    """All cells, or those whose ``model: layout`` has one of the words given in it."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    rows, began = [], time.process_time()
    for model in MODELS:
        for layout in LAYOUTS:
            name = f"{model}: {layout}"
            if words and not any(word in name for word in words):
                continue
            try:
                row = cell(model, layout)
            except Exception as error:
                print(f"| {name} | refused: {type(error).__name__}: {str(error).splitlines()[0][:150]} |", flush=True)
                continue
            rows.append(row)
            print(
                f"| {model} | {row['mesh']} | {layout} | {row['rank']} | {row['counted'] / 1e6:,.3f} | "
                f"{row['foretold'] / 1e6:,.3f} | {row['error']:+.2%} | {row['moment']} |", flush=True,
            )  # fmt: skip
    bad = [row for row in rows if abs(row["error"]) > 0.03]
    worst = max((abs(row["error"]) for row in rows), default=0)
    print(f"{len(rows)} cells, {len(rows) - len(bad)} within 3 %, worst {worst:.2%}")
    if "--json" in sys.argv:
        environment = {"torch": torch.__version__, "cpu_s": round(time.process_time() - began, 1)}
        print(json.dumps({"cells": rows, "environment": environment}))


if __name__ == "__main__":
    main()

"""What the cells of a published row say, however they are spelled: numbers, yes or no, sharding, precision,
recomputation."""

import re

from published_systems import Skip

from shoal.cluster.facts import Device

#: What tables write where nothing was published.
NOTHING = ("nan", "none published", "n/a", "na", "-", "--", "?", "null", "unknown", "not published", "not stated")
NO = ("none", "no", "false", "off", "0", "n", "without", "disabled")
YES = ("yes", "true", "on", "1", "y", "x", "enabled", "with")
#: Levels of sharding by the words for them; ``hsdp`` stands before ``fsdp``, which it contains in long names.
LEVELS = (
    ("replicate", r"\bddp\b|\bdp\b|replicate|zero[- ]?(?:stage[- ]?)?0|no[_ ]shard"),
    ("hsdp", r"hsdp|hybrid"),
    ("zero3", r"zero[- ]?(?:stage[- ]?)?3|fsdp|full[_ ]shard|\bstage[- ]?3|zero\+\+|fully[- ]sharded"),
    ("zero2", r"zero[- ]?(?:stage[- ]?)?2|shard[_ ]grad[_ ]op|\bstage[- ]?2"),
    ("zero1", r"zero[- ]?(?:stage[- ]?)?1|dist(?:ributed)?[-_ ]?opt|optimizer shard|sharded optimizer|\bstage[- ]?1"),
)


def clean(cell) -> str:
    """A cell's text, empty where it says that there is none."""
    text = (cell or "").strip()
    return "" if text.lower() in NOTHING else text


#: A number at a cell's start, and what multiplies it.
NUMBER = re.compile(r"[~≈<>≤≥ ]*(-?\d[\d,]*\.?\d*(?:[eE][+-]?\d+)?) ?([kKM])?(?![\w.])")


def number(row, name, default=None):
    """A cell as a number, ``default`` where it is empty or no number. Positions are counted in 1024s."""
    found = NUMBER.match(row.get(name, ""))
    if not found:
        return default
    thousand = 1024 if name == "seq_len" else 1000
    return float(found[1].replace(",", "")) * thousand ** " kM".index((found[2] or " ").replace("K", "k"))


def whole(row, name, default=1) -> int:
    """A cell as a degree: a whole number from 1 on, ``default`` where it is none."""
    return max(1, int(number(row, name) or default))


def says(row, name) -> bool | None:
    """Whether a cell says yes; None where it is empty or says neither."""
    first = (re.split(r"[\s,;(]", row[name].lower().strip()) or [""])[0]
    return True if first in YES else False if first in NO else None


def sharding(row) -> str:
    """``none``, ``hsdp`` or ``zero1`` to ``zero3``: by the cell, else by what the row's text names. Raises Skip."""
    cell = row["sharding"].lower()
    if says(row, "sharding") is not None:
        return "zero3" if says(row, "sharding") else "none"
    text = cell or f"{row['source']} {row['section']}".lower()
    found = next((level for level, words in LEVELS[bool(not cell) :] if re.search(words, text)), None)
    if cell and found is None:
        raise Skip(f"sharding {row['sharding']}")
    return "none" if found in (None, "replicate") else found


def recomputed(row, attention_alone: bool = False) -> float | None:
    """Share of blocks computed twice, None where it is not published. Hardware over model FLOPs say it.
    ``attention_alone``: whether the system's selective recomputation is of attention alone, which costs little."""
    cell, hardware = row["recompute"].lower(), re.search(r"HFU ([\d.]+)", row["notes"])
    if says(row, "recompute") is False:
        return 0.0
    if hardware and cell and (model := number(row, "mfu")):
        return min(1.0, max(0.0, 3 * (float(hardware[1]) / model - 1)))
    if share := re.fullmatch(r"([\d.]+) ?%", cell):
        return min(1.0, float(share[1]) / 100)
    if re.search(r"select|partial|attn|attention|\bsac\b|\bop\b", cell):
        return 0.0 if attention_alone or "recompute" in row["notes"] else 0.5
    whole_ = says(row, "recompute") or re.search(r"full|block|uniform|checkpoint|\ball\b|every", cell)
    return 1.0 if whole_ else None


def precision(row, device: Device) -> str:
    """Of the products; half precision is the one that the device has. Raises Skip: a precision that is not modelled."""
    text = row["precision"].lower()
    if narrow := re.search(r"(?:fp|float|f)([48])(?!\d)|e4m3|e5m2", text):
        return f"fp{narrow[1] or 8}"
    if re.search(r"tf32|fp64|float64", text):
        raise Skip(f"precision {row['precision']}")
    if re.fullmatch(r"(fp|float)?[- ]?32([- ](true|full))?|full precision", text):
        return "fp32"
    old = re.search(r"fp16|float16|\bhalf\b", text) and not re.search("bf16|bfloat16", text)
    return "fp16" if old or "bf16" not in device.flops_per_s else "bf16"

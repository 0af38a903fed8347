"""What a run came to: totals kept while it runs, and the text that a person reads at its end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from shoal.core.fields import flat
from shoal.plan.mesh import Mesh

PARTS = {
    "data_wait_s": "waiting for data",
    "forward_backward_s": "forward and backward",
    "sync_exposed_s": "waiting for gradients",
    "optimizer_s": "optimizer",
    "checkpoint_stall_s": "copying for checkpoints",
    "other_s": "other",
}


class RunTotals:
    """Sums over the step rows of this attempt.

    Rates leave out the first step, which pays for warming up, unless it is the only one.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.samples = 0
        self.tokens: int | None = None
        self.padded_tokens: int | None = None
        self.seconds = 0.0
        self.skipped = 0
        self._first: tuple[float, int, int] = (0.0, 0, 0)
        self._parts = dict.fromkeys(PARTS, 0.0)

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row; kinds other than step and skip are passed over."""
        if row.get("kind") == "skip":
            self.skipped += 1
        if row.get("kind") != "step":
            return
        seconds, samples, tokens = row.get("step_s") or 0.0, row.get("samples") or 0, row.get("tokens")
        if self.steps == 0:
            self._first = (seconds, samples, tokens or 0)
        self.steps += 1
        self.seconds += seconds
        self.samples += samples
        if tokens is not None:
            self.tokens = (self.tokens or 0) + tokens
            self.padded_tokens = (self.padded_tokens or 0) + (row.get("padded_tokens") or tokens)
        for part in PARTS:
            self._parts[part] += row.get(part) or 0.0

    @property
    def samples_per_s(self) -> float | None:
        """Samples of all workers per second of step time; None before the first step."""
        return self._rate(self.samples, self._first[1])

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens of all workers per second of step time; None where the data has no tokens."""
        return None if self.tokens is None else self._rate(self.tokens, self._first[2])

    def parts(self) -> dict[str, float]:
        """Seconds of each part in the mean step."""
        return {part: total / self.steps for part, total in self._parts.items()} if self.steps else {}

    def _rate(self, total: int, first: int) -> float | None:
        if self.steps > 1 and self.seconds > self._first[0]:
            return (total - first) / (self.seconds - self._first[0])
        return total / self.seconds if self.seconds > 0 else None


def summary(result: Mapping[str, Any]) -> str:
    """The end of a run in a few lines.

    ``result``: ``steps, steps_here, loss, eval, metrics, samples_per_s, tokens_per_s, tokens, padded_tokens, out,
    seconds, skipped, parts, stragglers, compress, model_flops_per_s, utilisation``; whatever is missing or None is
    left out.
    ``eval`` is a loss, ``metrics`` a mapping of numbers, ``parts`` the seconds of the mean step by the names of a step
    row, ``stragglers`` sentences, ``prediction`` {"predicted": seconds by part, "measured": the same}.
    """
    lines = [_head(result)]
    losses = [f"loss {_number(result['loss'])}"] if result.get("loss") is not None else []
    if result.get("eval") is not None:
        losses.append(f"held-out loss {_number(result['eval'])}")
    losses += [f"{name} {_number(value)}" for name, value in (result.get("metrics") or {}).items() if value is not None]
    if losses:
        lines.append("  " + ", ".join(losses))
    rates = [
        f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s"
        for unit in ("tokens", "samples")
        if (rate := result.get(f"{unit}_per_s")) is not None
    ]
    if rates:
        lines.append("  " + ", ".join(rates) + " over all workers")
    if (flops := result.get("model_flops_per_s")) is not None:
        share = result.get("utilisation")
        text = "" if share is None else f", {share:.0%} of their matrix peak"
        lines.append(f"  {_flops(flops)} over all workers{text} (3 x a forward's model FLOPs)")
    real, padded = result.get("tokens"), result.get("padded_tokens")
    if real and padded and padded > real:
        lines.append(f"  {real:,.0f} tokens; {padded:,.0f} with padding ({(padded - real) / padded:.0%} of it padding)")
    parts = result.get("parts") or {}
    total = sum(parts.values())
    if total > 0:
        shares = sorted(((value / total, name) for name, value in parts.items()), reverse=True)
        shown = ", ".join(f"{PARTS.get(name, name)} {share:.0%}" for share, name in shares if share >= 0.005)
        lines.append(f"  mean step {duration(total)}: {shown}")
    if coded := result.get("compress"):
        lines.append(
            f"  gradients as {coded['codec']}: a worker sends {_megabytes(coded['sent_bytes'])} a step, "
            f"{_megabytes(coded['plain_bytes'])} without"
        )
    lines += _prediction(result.get("prediction") or {})
    lines += [f"  {sentence}" for sentence in result.get("stragglers") or ()]
    if result.get("out") is not None:
        lines.append(f"  in {result['out']}")
    return "\n".join(lines)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.3g} MB"


def _flops(per_s: float) -> str:
    """``1.23e12 -> '1.23 TFLOP/s'``."""
    unit, size = next(
        ((unit, size) for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)) if per_s >= size), ("M", 1e6)
    )
    return f"{per_s / size:.3g} {unit}FLOP/s"


def _prediction(account: Mapping[str, Mapping[str, float]]) -> list[str]:
    """The predicted step beside the measured one, part by part."""
    if not account:
        return []
    predicted, found = account["predicted"], account["measured"]
    parts = [
        f"{PARTS[name]} {duration(value)} / {duration(found[name])}"
        for name, value in predicted.items()
        if name in PARTS and (value or found[name])
    ]
    whole, real = predicted["step_s"], found["step_s"]
    return [
        f"  step predicted / measured: {duration(whole)} / {duration(real)} ({_gap(whole, real)}): {', '.join(parts)}"
    ]


def _gap(predicted: float, found: float) -> str:
    if not predicted:
        return "nothing was predicted"
    ratio = found / predicted
    return f"{ratio - 1:+.0%}" if ratio <= 2 else f"{ratio:.3g} times as long"


def start_text(record: Mapping[str, Any]) -> list[str]:
    """The beginning of a run: its batch, its length, and every value with where it is from.

    ``record``: ``batch, windows_per_epoch, steps, fields, settings, origins`` of a run's record; what is missing is
    left out.
    """
    lines = []
    if batch := record.get("batch"):
        text = "global batch {global_batch} = {ranks} worker(s) x {accumulation} micro-batch(es) of {micro_batch}"
        lengths = [
            f"{record[name]:,} {words}"
            for name, words in (("windows_per_epoch", "steps per epoch"), ("steps", "steps in all"))
            if record.get(name) is not None
        ]
        lines.append("; ".join([text.format(**batch), *lengths]))
    origins, decided = record.get("origins") or {}, _decided(record.get("plan") or {})
    for origin, words in (
        ("given", "given"),
        ("job", "from the job's file"),
        ("plan", "decided by the plan's file"),
        ("planned", "as planned"),
        ("default", "by default"),
    ):
        shown = [
            f"{name if part == 'fields' else '--' + name.replace('_', '-')}="
            f"{_typed(decided.get(name, value) if origin == 'plan' else value)}"
            for part in ("fields", "settings")
            for name, value in flat(record.get(part) or {})
            if (origins.get(part) or {}).get(name) == origin
        ]
        if shown:
            lines.append(f"{words}: {' '.join(shown)}")
    return lines


def _decided(plan: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's values as they are typed."""
    mesh = {"mesh": str(Mesh.parse(plan["mesh"]))} if "mesh" in plan else {}
    return {**plan, **mesh}


def duration(seconds: float) -> str:
    """``0.0123 -> '12.3 ms'``, ``75 -> '1 min 15 s'``, ``7300 -> '2 h 01 min'``."""
    if seconds < 1:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def _head(result: Mapping[str, Any]) -> str:
    steps = result.get("steps") or 0
    text = f"{steps:,} step{'' if steps == 1 else 's'}"
    here = result.get("steps_here", steps)
    if steps and not here:
        return f"{text}, all of them done before: nothing was left to do"
    if here != steps:
        text += f", {here:,} of them now,"
    if result.get("seconds") is not None:
        text += f" in {duration(result['seconds'])}"
    if result.get("skipped"):
        text += f", {result['skipped']} of them skipped (their loss or gradients were not finite)"
    return text


def _typed(value: Any) -> str:
    """A value so that a shell reads it back as one word."""
    return shlex.quote(value) if isinstance(value, str) else str(value)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)

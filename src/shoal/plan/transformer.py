"""A transformer's profile from its shape alone: for published rows, and as a cross-check of the traced one.

Per token and layer, with h hidden, f feed-forward width, a heads of d, g key-value heads, s positions: forward FLOPs
2 (2 h (a + g) d + 3 h f) + 4 s a d, halved in attention where the causal mask's hidden half is left out. Bytes kept for
backward: Korthikanti et al., https://arxiv.org/abs/2205.05198, without the attention matrix where attention is fused.
"""

from __future__ import annotations

from shoal.plan.profile import Block, Op, Profile, Traffic, Weight
from shoal.plan.shapes import Experts, Shape, Software, Split

WHOLE, FUSED = Split(), Software()
#: Bytes of an activation by precision; in fp8 and fp4 only products' inputs are kept in one byte.
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}
#: Products that keep a norm's result, except in latent attention their own.
AFTER_NORM = ("qkv", "down", "in", "ffn_up", "shared_up")
#: Names of blocks by their mixers.
KINDS = {"*-": "dense", "*E": "experts", "M": "mamba", "E": "experts", "*": "attention", "-": "feed-forward"}


def profile(
    shape: Shape, tokens: int, split: Split = WHOLE, precision: str = "bf16", software: Software = FUSED
) -> Profile:
    """One rank's share of ``shape`` on samples of ``tokens`` positions: embedding, layers, head with the loss."""
    part = Share(shape, tokens, split, precision, software)
    kinds = {}
    for layer in range(shape.layers):
        key = (shape.mixers(layer), layer % 2 if shape.window else 0)
        if key not in kinds:
            kinds[key] = part.layer(*key)
    layers = [
        kinds[shape.mixers(n), n % 2 if shape.window else 0]._replace(path=f"layers.{n}") for n in range(shape.layers)
    ]
    named = [
        block._replace(weights=tuple(w._replace(name=f"{block.path}.{w.name}") for w in block.weights))
        for block in layers
    ]
    return Profile(
        name=shape.name,
        tokens=tokens,
        tensor=split.tensor,
        sequence_parallel=split.sequence_parallel,
        context=split.context,
        expert=split.expert,
        precision=precision,
        kernels="cuda-flash" if software.flash else "cuda-math",
        blocks=(part.embedding(), *named, part.last()),
        model_flops=model_flops(shape, tokens),
    )


def model_flops(shape: Shape, tokens: int, attention: float = 1.0) -> float:
    """Of a forward of one sample; ``attention``: the part of it that counts (0.5: causal half)."""
    part = Share(shape, tokens, WHOLE, "bf16", Software(skips=False, grouped=1.0))
    ops = [op for n in range(shape.layers) for op in part.layer(shape.mixers(n), n % 2).ops]
    ops += part.last().ops
    return sum(op.flops * (attention if op.kind == "attention" else 1.0) for op in ops)


class Share:
    """One rank's share: widths after tensor, positions after context and sequence parallelism."""

    def __init__(self, shape: Shape, tokens: int, split: Split, precision: str, software: Software) -> None:
        """As ``profile``."""
        self.shape, self.split, self.software, self.length = shape, split, software, tokens
        self.t = split.tensor
        self.tokens = tokens / split.context
        self.sp = split.sequence_parallel and self.t > 1
        self.outside = self.tokens / self.t if self.sp else self.tokens
        self.width = WIDTHS[precision]
        self.narrow = precision in ("fp8", "fp4")
        self.wide = "bf16" if self.narrow else ""  # attention, router and head stay in bf16
        self.h = shape.hidden
        self.products = 3 if shape.gated else 2

    def layer(self, mixers: str, odd: int = 0) -> Block:
        """A repeated block of the mixers named as in ``Shape.pattern``; ``odd``: its attention sees a window."""
        ops: list[Op] = []
        weights: list[Weight] = []
        traffic: list[Traffic] = []
        software = self.software
        before = 0.0
        for mixer in mixers:
            made = {"*": self.attention, "-": self.dense, "E": self.experts, "M": self.mamba}[mixer]
            mine = self.attention(self.shape.window if odd else 0) if mixer == "*" else made()
            whole = [self.norm(), *mine[0], self.residual()]
            before += sum(op.kept_bytes for op in whole)
            ops += self.again(mixer, whole)
            weights += [*mine[1], self.weight(f"norm{mixer}", self.h, 1, self.t)]
            traffic += self.exchange() if mixer != "E" or self._experts.shared else ()
            traffic += self.dispatch() if mixer == "E" else ()
            traffic += self.keys() if mixer == "*" else ()
        ops = self.cast(ops)
        host = software.kernels * len(mixers) / 2
        carried = self.outside * self.h * self.width
        return Block(
            path="layers",
            kind=KINDS[mixers] + ("-window" if odd and "*" in mixers else ""),
            repeated=True,
            ops=tuple(op._replace(launches=host / len(ops)) for op in ops),
            traffic=tuple(traffic),
            weights=tuple(weights),
            carried_bytes=carried,
            input_bytes=carried,
            waits=software.expert_kernels if "E" in mixers else 0.0,
            again_bytes=before - sum(op.kept_bytes for op in ops),
        )

    def again(self, mixer: str, ops: list[Op]) -> list[Op]:
        """A mixer's operations, norm first, with those that the backward computes again: their results are not kept."""
        parts, body = self.software.again, {"E": "moe", "-": "mlp"}.get(mixer, "")
        if "operations" in parts:
            return [self.every_second(op, mixer) for op in ops]
        made = []
        for at, op in enumerate(ops):
            kept, runs = op.kept_bytes, 0
            if body in parts and 0 < at < len(ops) - 1 or "shared" in parts and op.name.startswith("shared"):
                kept, runs = self.outside * self.h * self.width * (at == 1), 1
            elif "act" in parts and op.name.endswith("_activation") or "layernorm" in parts and not at:
                runs = 1
            elif "act" in parts and op.name.endswith("_down") or "layernorm" in parts and op.name in AFTER_NORM:
                kept = 0.0
            made.append(op._replace(kept_bytes=kept, backward=op.backward + runs))
        return made

    def every_second(self, op: Op, mixer: str) -> Op:
        """An operation of a layer that keeps its input, the results of every second product and attention's alone, as
        torch's selective checkpointing is set up by https://github.com/pytorch/torchtitan (parallelize_llama.py): of
        query, key, value, out, gate, up, down the products of query, value, gate, down. Experts' are all run again."""
        wide, kv = self.h * self.width, max(1.0, self.shape.kv_heads / self.t) * self.shape.head
        kept, runs = {
            "norm": (self.outside * wide * (mixer == "*"), 1.0),
            "qkv": (op.m * (op.n - kv) * self.width, kv / op.n if op.n else 0.0),
            "attention": (op.m * (self.shape.heads / self.t) * (self.shape.head * self.width + 4), 0.0),
            "ffn_up": (op.m * op.n / (self.products - 1) * self.width, 1 - 1 / (self.products - 1)),
            "ffn_down": (self.outside * wide * self.shape.gated, 1.0 - self.shape.gated),
        }.get(op.name, (0.0, 1.0))
        return op._replace(kept_bytes=kept, backward=op.backward + runs)

    def product(self, name: str, k: float, n: float, kept: bool = True, tokens: float | None = None) -> Op:
        """A (tokens, k) x (k, n) product. It keeps its input; one that sequence parallelism gathers, as its share."""
        m = self.tokens if tokens is None else tokens
        rows = self.outside if k == self.h and tokens is None and self.software.regathers else m
        bytes_kept = rows * k * (1 if self.narrow else self.width) if kept else 0.0
        moved, fixed = m * (k + n) * self.width, k * n * self.width
        return Op(name, "matmul", m, k, n, 2.0 * m * k * n, moved, fixed, bytes_kept, 2.0, 1.0)

    def memory(self, name: str, elements: float, passes: float, kept: float = 0.0) -> Op:
        """Element-wise kernels that read and write ``passes`` x ``elements``, and half as much again in backward."""
        return Op(name, "memory", 0, 0, 0, 0.0, elements * passes * self.width, 0.0, kept, 1.5, 1.0)

    def norm(self) -> Op:
        elements, software = self.outside * self.h, self.software
        return self.memory("norm", elements, software.norm, elements * self.width * software.norm_kept)

    def residual(self) -> Op:
        elements, drops = self.outside * self.h, self.software.dropout
        return self.memory("residual", elements, self.software.residual + 2 * drops, elements * drops)

    def cast(self, ops: list[Op]) -> list[Op]:
        """With the casts of products' operands to fp8 or fp4."""
        moved = sum(op.moved_bytes for op in ops if op.kind == "matmul" and not op.precision)
        casts = Op("casts", "memory", 0, 0, 0, 0.0, moved * self.software.casts / 2, 0.0, 0.0, 1.0, 1.0)
        return [*ops, casts] if self.narrow else ops

    def attention(self, window: int = 0) -> tuple[list[Op], list[Weight]]:
        shape, t, h, n = self.shape, self.t, self.h, self.tokens
        q, kv = shape.heads * shape.head / t, max(1.0, shape.kv_heads / t) * shape.head
        v = q
        if shape.latent is None:
            ops = [self.product("qkv", h, q + 2 * kv)]
            weights = [self.weight("qkv", h * (q + 2 * kv), q + 2 * kv)]
        else:
            latent, heads = shape.latent, shape.heads / t
            wide, inner = shape.head + latent.rope_dim, latent.key_rank + latent.rope_dim
            ups = [("q_up", latent.query_rank or h, heads * wide)]
            ups.append(("kv_up", latent.key_rank, heads * (shape.head + latent.value_dim)))
            down = latent.query_rank + inner
            ops = [self.product("down", h, down), *(self.product(name, k, m) for name, k, m in ups)]
            weights = [self.weight("down", h * down, down, t), *(self.weight(name, k * m, m) for name, k, m in ups)]
            q, kv, v = heads * wide, heads * wide, heads * latent.value_dim
        if not shape.learned:
            ops.append(self.memory("rope", n * (q + kv), self.software.rope))
        seen = min(window or self.length, self.length)
        causal = self.software.flash and self.software.skips and not window
        scores = 0.0 if self.software.flash else n * seen * shape.heads / t
        flops = 2.0 * n * seen * (q + v) * (0.5 if causal else 1.0)
        held = n * (q + (q + v if self.software.expands else 2 * kv) + v) * self.width
        moved = held + scores * self.software.scores * self.width
        again = "attention" in self.software.again
        kept = held + (0.0 if again else scores * (2 * self.width + 1)) + n * shape.heads / t * 4
        backward = 2.5 + again
        ops.append(
            Op("attention", "attention", n, shape.head, seen, flops, moved, 0, kept, backward, 1.0, precision=self.wide)
        )
        return [*ops, self.product("out", v, h, kept=False)], [*weights, self.weight("out", h * v, h)]

    def feed_forward(self, name: str, ffn: float) -> tuple[list[Op], list[Weight]]:
        wide, gated, software = ffn / self.t, self.shape.gated, self.software
        elements = self.tokens * wide
        kept = elements * self.width * (software.activation_kept if gated else 1)
        ops = [
            self.product(f"{name}_up", self.h, wide * (self.products - 1)),
            self.memory(f"{name}_activation", elements, software.activation if gated else software.gelu, kept),
            self.product(f"{name}_down", wide, self.h),
        ]
        return ops, [self.weight(name, self.products * self.h * wide, wide)]

    def dense(self) -> tuple[list[Op], list[Weight]]:
        experts = self.shape.experts
        return self.feed_forward("ffn", (experts.dense_ffn or self.shape.ffn) if experts else self.shape.ffn)

    def experts(self) -> tuple[list[Op], list[Weight]]:
        """Router, dispatch, the experts' products (grouped), combine; what all tokens share."""
        experts, n = self._experts, self.outside
        width, local, rows = experts.width or self.h, experts.count / self.split.expert, n * experts.active
        router = self.product("router", self.h, experts.count, False, n)._replace(precision=self.wide)
        ops = [router, self.memory("dispatch", rows * width, 4)]
        weights = [self.weight("router", self.h * experts.count, experts.count, self.t)]
        ops += [
            self.grouped("expert_up", rows, width, (self.products - 1) * experts.ffn, local),
            self.memory("expert_activation", rows * experts.ffn, self.products, rows * 2 * experts.ffn * self.width),
            self.grouped("expert_down", rows, experts.ffn, width, local),
            self.memory("combine", rows * width, 3),
        ]
        numel = local * self.products * width * experts.ffn
        weights.append(self.weight("experts", numel, local * experts.ffn)._replace(expert=True))
        if experts.width:
            ops += [self.product("latent_down", self.h, width, tokens=n), self.product("latent_up", width, self.h)]
            weights.append(self.weight("latent", 2 * self.h * width, width, self.t))
        if experts.shared:
            shared = self.feed_forward("shared", experts.shared)
            ops, weights = ops + shared[0], weights + shared[1]
        return ops, weights

    def grouped(self, name: str, rows: float, k: float, n: float, local: float) -> Op:
        """``local`` products side by side, each of its experts' rows: all their tiles fill the device together."""
        flops = 2.0 * rows * k * n / self.software.grouped
        moved, fixed = rows * (k + n) * self.width, local * k * n * self.width
        kept = rows * k * (1 if self.narrow else self.width)
        return Op(name, "matmul", rows, k, n, flops, moved, fixed, kept, 2.0, 1.0)

    def mamba(self) -> tuple[list[Op], list[Weight]]:
        """Input product, convolution and scan, output product."""
        mamba = self.shape.mamba
        if mamba is None:
            return [], []
        inner, n = mamba.inner / self.t, self.tokens
        wide = 2 * inner + (2 * mamba.groups * mamba.state + mamba.heads) / self.t
        ops = [
            self.product("in", self.h, wide),
            self.memory("scan", n * wide, 20, n * (wide + 2 * inner) * self.width),
            Op("states", "attention", n, mamba.state, inner, 6.0 * n * inner * mamba.state, 0, 0, 0, 2.0, 1.0,
               precision=self.wide),
            self.product("out", inner, self.h),
        ]  # fmt: skip
        return ops, [self.weight("in", self.h * wide, wide), self.weight("out", inner * self.h, self.h)]

    @property
    def _experts(self) -> Experts:
        return self.shape.experts or Experts(1, 1, self.shape.ffn)

    def exchange(self) -> list[Traffic]:
        """What tensor ranks exchange around one mixer."""
        whole = self.tokens * self.h * self.width
        if self.t == 1:
            return []
        if not self.sp:
            return [
                Traffic("tensor", "all_reduce", "forward", whole),
                Traffic("tensor", "all_reduce", "backward", whole),
            ]
        gather, scatter = [
            [Traffic("tensor", kind, phase, whole) for phase in ("forward", "backward")]
            for kind in ("all_gather", "reduce_scatter")
        ]
        return [*gather, *scatter, *(gather[1:] if self.software.regathers else ())]

    def dispatch(self) -> list[Traffic]:
        """To the experts and back, in both passes."""
        if self.split.expert == 1:
            return []
        nbytes = self.outside * self._experts.active * (self._experts.width or self.h) * self.width
        active = self._experts.active
        sent = [Traffic("expert", "all_to_all", phase, nbytes, active) for phase in ("forward", "backward")]
        parts = self.split.expert / self._experts.count  # more than 1: of each expert, whose ranks share their rows
        shared = [
            Traffic("tensor", kind, phase, nbytes * parts)
            for kind in ("all_gather", "reduce_scatter")
            for phase in ("forward", "backward")
            if parts > 1
        ]
        return [*sent, *sent, *(sent[1:] * 2 if "moe" in self.software.again else ()), *shared]

    def keys(self) -> list[Traffic]:
        """Keys and values of all positions, and their gradients."""
        if self.split.context == 1:
            return []
        heads = self.shape.heads if self.software.expands else self.shape.kv_heads
        numel = 2 * self.length * max(1.0, heads / self.t) * self.shape.head
        gathers = [Traffic("context", "all_gather", phase, numel * self.width) for phase in ("forward", "backward")]
        scattered = numel * (self.software.ring_gradient or self.width)
        return [*gathers, Traffic("context", "reduce_scatter", "backward", scattered)]

    @staticmethod
    def weight(name: str, numel: float, rows: float, copies: int = 1, tie: str = "") -> Weight:
        return Weight(name, round(numel), max(1, round(rows)), True, copies, False, tie)

    def embedding(self) -> Block:
        shape, t = self.shape, self.t
        weights = [self.weight("embedding", shape.vocab * self.h / t, shape.vocab / t, tie=self.tie)]
        if shape.learned:
            weights.append(self.weight("positions", shape.learned * self.h, shape.learned, t))
        dense = shape.vocab * self.h / t * self.width  # the gradient of the whole table is written
        op = self.memory("embedding", self.tokens * self.h, 2)
        op = op._replace(back_moved_bytes=self.tokens * self.h * self.width, back_fixed_bytes=dense)
        traffic = self.exchange()[1:2] if self.sp else self.exchange()[:1]
        scatter = tuple(one._replace(collective="reduce_scatter", phase="forward") for one in traffic if self.sp)
        return Block(
            "embedding", "embedding", False, (op,), scatter or tuple(traffic), tuple(weights), 0.0, 8.0 * self.tokens
        )

    def last(self) -> Block:
        """Norm, head and loss over a share of the vocabulary."""
        software, logits = self.software, self.tokens * self.shape.vocab / self.t
        moved, kept = logits * software.loss_bytes / 2, logits * software.loss_kept
        ops = (
            self.norm(),
            self.product("head", self.h, self.shape.vocab / self.t)._replace(precision=self.wide),
            Op("loss", "memory", 0, 0, 0, 0.0, moved, 0.0, kept, 1.0, 8.0),
        )
        weights = (
            self.weight("norm", self.h, 1, self.t),
            self.weight("head", self.shape.vocab * self.h / self.t, self.shape.vocab / self.t, tie=self.tie),
        )
        carried = self.outside * self.h * self.width
        traffic = tuple(one for one in self.exchange() if self.sp or one.phase == "backward")
        return Block("head", "head", False, ops, traffic, weights, carried, carried)

    @property
    def tie(self) -> str:
        return "embedding" if self.shape.tied else ""

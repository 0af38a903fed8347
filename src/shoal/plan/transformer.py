"""A transformer's profile from its shape alone: for published rows, and as a cross-check of the traced one.

Per token and block, with h hidden, f feed-forward width, a heads of d, g key-value heads, t tensor degree: forward FLOPs
2 (h (a + 2 g) d + a d h + 3 h f) + 4 s a d, bytes kept for backward as in Korthikanti et al.,
https://arxiv.org/abs/2205.05198, without the attention matrix where attention is fused.
"""

from __future__ import annotations

from typing import NamedTuple

from shoal.plan.profile import Block, Op, Profile, Traffic, Weight

#: Bytes of an activation by precision; products in fp8 keep their inputs in one byte, all else stays in two.
WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "fp8": 2, "fp4": 2}


class Experts(NamedTuple):
    """Feed-forward by experts: ``count`` of width ``ffn``, ``active`` per token, ``shared`` width for every token."""

    count: int
    active: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0


class Latent(NamedTuple):
    """Multi-head latent attention, https://arxiv.org/abs/2405.04434: ranks of the query's and the keys' products."""

    query_rank: int
    key_rank: int
    rope_dim: int
    value_dim: int


class Shape(NamedTuple):
    """A transformer. ``head_dim`` 0: hidden / heads. ``norm``: rms or layer. ``gated``: three feed-forward products."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    gated: bool = True
    norm: str = "rms"
    tied: bool = False
    learned_positions: int = 0
    biases: bool = False
    experts: Experts | None = None
    latent: Latent | None = None

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads


class Software(NamedTuple):
    """What a framework's kernels do. ``flash``: attention keeps no scores; ``skips``: nor computes those that the
    causal mask hides. ``norm``, ``activation``, ``residual``: tensors of (tokens, width) that their kernels read and
    write in a forward; each ``_kept``: those kept for backward. ``loss_bytes``: moved per logit, forward and backward.
    ``kernels``: started per block in a forward.
    """

    flash: bool = True
    skips: bool = True
    norm: float = 2
    norm_kept: float = 1
    activation: float = 3
    activation_kept: float = 2
    residual: float = 3
    dropout: bool = False
    loss_bytes: float = 16
    scores: float = 6
    casts: float = 2
    grouped: float = 0.5
    expert_kernels: float = 300
    kernels: float = 16


def profile(
    shape: Shape,
    tokens: int,
    *,
    tensor: int = 1,
    sequence_parallel: bool = False,
    context: int = 1,
    expert: int = 1,
    precision: str = "bf16",
    software: Software = Software(),
) -> Profile:
    """One rank's share of ``shape`` on samples of ``tokens`` positions."""
    part = _Part(shape, tokens, tensor, sequence_parallel, context, expert, precision, software)
    layers = [part.layer(dense=_dense(shape, index), index=index) for index in range(shape.layers)]
    flops = 2.0 * sum(op.flops for op in _Part(shape, tokens, 1, False, 1, 1, precision, software).products())
    return Profile(
        name=shape.name,
        tokens=tokens,
        tensor=tensor,
        sequence_parallel=sequence_parallel,
        context=context,
        expert=expert,
        precision=precision,
        kernels="cuda-flash" if software.flash else "cuda-math",
        blocks=(part.embedding(), *layers, part.last()),
        model_flops=flops / 2,
    )


def _dense(shape: Shape, index: int) -> bool:
    return shape.experts is None or index < shape.experts.dense_layers


class _Part:
    """One rank's share: widths after tensor, positions after context and sequence parallelism."""

    def __init__(self, shape, tokens, tensor, sequence_parallel, context, expert, precision, software) -> None:
        self.shape, self.t, self.cp, self.ep, self.software = shape, tensor, context, expert, software
        self.tokens = tokens / context
        self.precision = precision
        self.wide = "bf16" if precision in ("fp8", "fp4") else ""  # attention, router and head stay in bf16
        self.length = tokens
        self.outside = self.tokens / tensor if sequence_parallel and tensor > 1 else self.tokens
        self.sp = sequence_parallel and tensor > 1
        self.width = WIDTHS[precision]
        self.causal = 0.5 if software.flash and software.skips else 1.0
        self.launches = software.kernels / 50  # of embedding and head, which hold few kernels

    def product(self, name: str, k: float, n: float, *, tokens: float | None = None, kept: float | None = None) -> Op:
        """A (tokens, k) x (k, n) product; it keeps its input for the weight's gradient unless told otherwise."""
        m = self.tokens if tokens is None else tokens
        kept = m * k * self.width if kept is None else kept
        moved = m * (k + n) * self.width
        return Op(name, "matmul", m, k, n, 2.0 * m * k * n, moved, k * n * self.width, kept, 2.0, self.launches)

    def memory(self, name: str, elements: float, passes: float, kept: float = 0.0, launches: float = 1.0) -> Op:
        """An element-wise kernel that reads and writes ``passes`` x ``elements``."""
        moved = elements * passes * self.width
        return Op(name, "memory", 0, 0, 0, 0.0, moved, 0.0, kept, 1.5, launches * self.launches)

    def norm(self, name: str) -> Op:
        elements, software = self.outside * self.shape.hidden, self.software
        return self.memory(name, elements, software.norm, elements * self.width * software.norm_kept)

    def cast(self, ops: list[Op]) -> list[Op]:
        """With what casting a product's operands to fp8 or fp4 moves."""
        if self.precision not in ("fp8", "fp4"):
            return ops
        moved = sum(op.moved_bytes for op in ops if op.kind == "matmul" and not op.precision) * self.software.casts / 2
        return [*ops, Op("casts", "memory", 0, 0, 0, 0.0, moved, 0.0, 0.0, 1.0, 1)]

    def layer(self, dense: bool, index: int) -> Block:
        """A repeated block: attention, then feed-forward."""
        shape, width = self.shape, self.width
        ops = self.cast([*self.attention(), *(self.feed_forward(self._ffn(dense)) if dense else self.expert_ffn())])
        kernels = self.software.kernels + (0 if dense else self.software.expert_kernels)
        carried = self.tokens * shape.hidden * width / (self.t if self.sp else 1)
        path = f"layers.{index}"
        return Block(
            path=path,
            kind="dense" if dense else "experts",
            repeated=True,
            ops=tuple(op._replace(launches=kernels / len(ops)) for op in ops),
            traffic=self.traffic(dense),
            weights=self.weights(path, dense),
            carried_bytes=carried,
            input_bytes=carried,
        )

    def _ffn(self, dense: bool) -> int:
        experts = self.shape.experts
        return experts.dense_ffn or experts.ffn if dense and experts else self.shape.ffn

    def attention(self) -> list[Op]:
        shape, t, w = self.shape, self.t, self.width
        q, kv = shape.heads * shape.head / t, max(1.0, shape.kv_heads / t) * shape.head
        n, s = self.tokens, self.length
        ops = [self.norm("attention_norm")]
        if shape.latent is None:
            ops.append(self.product("qkv", shape.hidden, q + 2 * kv))
            v = q
        else:
            lat = shape.latent
            heads, wide = shape.heads / t, shape.head + lat.rope_dim
            ops.append(self.product("q_down", shape.hidden, lat.query_rank + lat.key_rank + lat.rope_dim))
            ops.append(self.product("q_up", lat.query_rank, heads * wide))
            ops.append(self.product("kv_up", lat.key_rank, heads * (shape.head + lat.value_dim)))
            q, kv, v = heads * wide, heads * wide, heads * lat.value_dim
        if not shape.learned_positions:
            ops.append(self.memory("rope", n * (q + kv), 2))
        flops = 2.0 * n * s * (q + v) * self.causal
        scores = 0.0 if self.software.flash else n * s * shape.heads / t
        kept = n * (q + 2 * kv + v) * w + scores * (2 * w + 1) + n * shape.heads / t * 4
        moved = n * (q + 2 * kv + v) * w + scores * self.software.scores * w
        ops.append(
            Op("attention", "attention", n, shape.head, s, flops, moved, 0, kept, 2.5, self.launches, 0, self.wide)
        )
        ops.append(self.product("attention_out", v, shape.hidden, kept=0.0))
        ops.append(self.residual("attention_add"))
        return ops

    def residual(self, name: str) -> Op:
        elements, software = self.outside * self.shape.hidden, self.software
        kept = elements * self.width + (elements if software.dropout else 0)
        return self.memory(name, elements, software.residual + (2 if software.dropout else 0), kept)

    def feed_forward(self, ffn: float, tokens: float | None = None) -> list[Op]:
        n, t, h = self.tokens if tokens is None else tokens, self.t, self.shape.hidden
        gated, software = self.shape.gated, self.software
        wide = ffn / t
        kept = n * wide * self.width * (software.activation_kept if gated else 1)
        passes = software.activation if gated else 2
        return [
            self.norm("ffn_norm"),
            self.product("up", h, wide * (2 if gated else 1), tokens=n),
            self.memory("activation", n * wide, passes, kept),
            self.product("down", wide, h, tokens=n),
            self.residual("ffn_add"),
        ]

    def expert_ffn(self) -> list[Op]:
        """Router, dispatch, the experts' products (grouped), combine."""
        experts, h, n = self.shape.experts, self.shape.hidden, self.outside
        assert experts is not None
        local = max(1.0, experts.count / self.ep)
        rows = n * experts.active
        f = experts.ffn
        ops = [
            self.norm("ffn_norm"),
            self.product("router", h, experts.count, tokens=n, kept=0.0)._replace(precision=self.wide),
            self.memory("dispatch", rows * h, 4, rows * h * self.width, 6),
            Op(
                "up",
                "matmul",
                rows / local,
                h,
                2 * f,
                4.0 * rows * h * f / self.software.grouped,
                rows * (h + 2 * f) * self.width,
                local * 2 * h * f * self.width,
                rows * h * self.width,
                2.0,
                2,
            ),
            self.memory("activation", rows * f, 3, rows * 2 * f * self.width, 1),
            Op(
                "down",
                "matmul",
                rows / local,
                f,
                h,
                2.0 * rows * h * f / self.software.grouped,
                rows * (h + f) * self.width,
                local * h * f * self.width,
                rows * f * self.width,
                2.0,
                2,
            ),
            self.memory("combine", rows * h, 3, rows * h * self.width, 4),
        ]
        if experts.shared:
            ops += [
                self.product("shared_up", h, experts.shared * 2 / self.t),
                self.memory(
                    "shared_activation",
                    self.tokens * experts.shared / self.t,
                    3,
                    self.tokens * experts.shared / self.t * 2 * self.width,
                ),
                self.product("shared_down", experts.shared / self.t, h),
            ]
        ops.append(self.residual("ffn_add"))
        return ops

    def traffic(self, dense: bool) -> tuple[Traffic, ...]:
        h, w, found = self.shape.hidden, self.width, []
        whole = self.tokens * h * w
        regions = 2 if dense else 1
        if self.t > 1 and self.sp:
            for _ in range(regions):
                found += [
                    Traffic("tensor", "all_gather", "forward", whole),
                    Traffic("tensor", "reduce_scatter", "forward", whole),
                ]
                found += [Traffic("tensor", "all_gather", "backward", whole)] * 2 + [
                    Traffic("tensor", "reduce_scatter", "backward", whole)
                ]
        elif self.t > 1:
            for _ in range(regions):
                found += [Traffic("tensor", "all_reduce", phase, whole) for phase in ("forward", "backward")]
        if self.cp > 1:
            kv = 2 * self.length * max(1.0, self.shape.kv_heads / self.t) * self.shape.head * w
            found += [
                Traffic("context", "all_gather", "forward", kv),
                Traffic("context", "all_gather", "backward", kv),
                Traffic("context", "reduce_scatter", "backward", kv),
            ]
        if not dense and self.ep > 1:
            assert self.shape.experts is not None
            rows = self.outside * self.shape.experts.active * h * w
            found += [
                Traffic("expert", "all_to_all", phase, rows) for phase in ("forward", "backward") for _ in range(2)
            ]
        return tuple(found)

    def weights(self, path: str, dense: bool) -> tuple[Weight, ...]:
        shape, t = self.shape, self.t
        h = shape.hidden
        q, kv = shape.heads * shape.head / t, max(1.0, shape.kv_heads / t) * shape.head
        found = [self.weight(f"{path}.norms", 2 * h * (1 if shape.norm == "rms" else 2), 1, t)]
        if shape.latent is None:
            found.append(self.weight(f"{path}.qkv", h * (q + 2 * kv), q + 2 * kv))
            found.append(self.weight(f"{path}.out", h * q, h))
        else:
            lat, heads = shape.latent, shape.heads / t
            found.append(
                self.weight(f"{path}.down", h * (lat.query_rank + lat.key_rank + lat.rope_dim), lat.query_rank, t)
            )
            found.append(self.weight(f"{path}.q_up", lat.query_rank * heads * (shape.head + lat.rope_dim), heads))
            found.append(self.weight(f"{path}.kv_up", lat.key_rank * heads * (shape.head + lat.value_dim), heads))
            found.append(self.weight(f"{path}.out", h * heads * lat.value_dim, h))
        products = 3 if shape.gated else 2
        if dense:
            found.append(self.weight(f"{path}.ffn", products * h * self._ffn(True) / t, self._ffn(True) / t))
            return tuple(found)
        experts = shape.experts
        assert experts is not None
        found.append(self.weight(f"{path}.router", h * experts.count, experts.count, t))
        local = max(1.0, experts.count / self.ep)
        found.append(self.weight(f"{path}.experts", local * 3 * h * experts.ffn, local * experts.ffn, 1, expert=True))
        if experts.shared:
            found.append(self.weight(f"{path}.shared", 3 * h * experts.shared / t, experts.shared / t))
        return tuple(found)

    @staticmethod
    def weight(name: str, numel: float, rows: float, copies: int = 1, *, expert: bool = False, tie: str = "") -> Weight:
        return Weight(name, round(numel), round(rows), True, copies, expert, tie)

    def embedding(self) -> Block:
        shape, t = self.shape, self.t
        op = self.memory("embedding", self.tokens * shape.hidden, 2)
        tie = "embedding" if shape.tied else ""
        weights = [self.weight("embedding", shape.vocab * shape.hidden / t, shape.vocab / t, tie=tie)]
        if shape.learned_positions:
            weights.append(self.weight("positions", shape.learned_positions * shape.hidden, shape.learned_positions, t))
        whole = self.tokens * shape.hidden * self.width
        traffic = (Traffic("tensor", "reduce_scatter" if self.sp else "all_reduce", "forward", whole),) if t > 1 else ()
        return Block("embedding", "embedding", False, (op,), traffic, tuple(weights), 0.0, self.tokens * 8)

    def last(self) -> Block:
        shape, n, v = self.shape, self.tokens, self.shape.vocab / self.t
        logits = n * v
        ops = (
            self.norm("norm"),
            self.product("head", shape.hidden, v)._replace(precision=self.wide),
            Op(
                "loss",
                "memory",
                0,
                0,
                0,
                0.0,
                logits * self.software.loss_bytes / 2,
                0.0,
                logits * 4,
                1.0,
                8 * self.launches,
            ),
        )
        whole = n * shape.hidden * self.width
        traffic = []
        if self.t > 1:
            traffic.append(Traffic("tensor", "all_gather" if self.sp else "all_reduce", "backward", whole))
            if self.sp:
                traffic += [
                    Traffic("tensor", "all_gather", "forward", whole),
                    Traffic("tensor", "reduce_scatter", "backward", whole),
                ]
        tie = "embedding" if shape.tied else ""
        weights = (
            self.weight("norm", shape.hidden, 1, self.t),
            self.weight("head", shape.vocab * shape.hidden / self.t, v, tie=tie),
        )
        carried = n * shape.hidden * self.width / (self.t if self.sp else 1)
        return Block("head", "head", False, ops, tuple(traffic), weights, carried, carried)

    def products(self) -> list[Op]:
        """All products and attention of a forward of one sample, attention in full."""
        shape = self.shape
        ops = [op for index in range(shape.layers) for op in self.layer(_dense(shape, index), index).ops]
        ops += self.last().ops
        return [op._replace(flops=op.flops / self.causal) if op.kind == "attention" else op for op in ops]

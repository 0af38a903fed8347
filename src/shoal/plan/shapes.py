"""Shapes of transformers, and what a training system's kernels do with them. Values."""

from __future__ import annotations

from typing import NamedTuple


class Experts(NamedTuple):
    """Feed-forward by experts: ``count`` of width ``ffn``, ``active`` per token, ``shared`` width for every token.
    The first ``dense_layers`` have a plain one of ``dense_ffn``. ``width``: what experts read and write, where it is
    not the model's hidden width (projected down and up again)."""

    count: int
    active: int
    ffn: int
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    width: int = 0


class Latent(NamedTuple):
    """Multi-head latent attention, https://arxiv.org/abs/2405.04434: ranks of the query's and the keys' products
    (``query_rank`` 0: one whole product), width of the rotated part of a head, of a head's values."""

    query_rank: int
    key_rank: int
    rope_dim: int
    value_dim: int


class Mamba(NamedTuple):
    """Mamba-2, https://arxiv.org/abs/2405.21060: width inside, state size, groups, heads."""

    inner: int
    state: int
    groups: int
    heads: int


class Shape(NamedTuple):
    """A model of layers. ``head_dim`` 0: hidden / heads. ``gated``: three feed-forward products in place of two.
    ``learned``: learned positions (0: rotary or none). ``window``: of every second layer's attention, 0 for all.
    ``pattern``: one letter per layer where each is a single mixer: M Mamba, E experts, * attention, - feed-forward."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    head_dim: int = 0
    gated: bool = True
    tied: bool = False
    learned: int = 0
    window: int = 0
    experts: Experts | None = None
    latent: Latent | None = None
    mamba: Mamba | None = None
    pattern: str = ""

    @property
    def head(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def parameters(self) -> int:
        """Numbers in a dense model's products and embeddings."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head
        layer = attention + (3 if self.gated else 2) * self.hidden * self.ffn
        return self.layers * layer + (1 if self.tied else 2) * self.vocab * self.hidden

    def mixers(self, layer: int) -> str:
        """What a layer is made of, as in ``pattern``."""
        if self.pattern:
            return self.pattern[layer]
        return "*-" if self.experts is None or layer < self.experts.dense_layers else "*E"


class Software(NamedTuple):
    """What a training system's kernels do. Tensors of (tokens, width) that are read and written in a forward: by a
    ``norm``, by an ``activation`` (gated) or a ``gelu`` (not), by adding to the ``residual``, by rotating
    (``rope``), per attention score (``scores``, where attention is not fused: ``flash``). ``skips``: fused attention
    leaves out what the causal mask hides.
    ``norm_kept``, ``activation_kept``: such tensors kept for backward; ``loss_kept`` bytes per logit. ``loss_bytes``:
    moved per logit, forward and backward. ``casts``: a product's operands read and written to be cast to fp8 or fp4.
    ``grouped``: rate of experts' products over a whole product's. ``kernels``: starts per layer in a forward, in which
    the host's other time is counted; ``expert_kernels``: of a layer of experts, whose start waits
    until the host knows how many rows each expert gets. ``regathers``: with sequence
    parallelism, gathered inputs are gathered anew in backward, not kept. ``expands``: keys and values are copied to
    every head before attention, which keeps the copies. ``again``: parts of a layer that are computed again in the
    backward, as Megatron-LM names them: layernorm, act, moe, mlp, shared; attention, which then keeps no scores
    (selective recomputation, https://arxiv.org/abs/2205.05198); operations: all of a layer but every second product and
    attention. ``ring_gradient``: bytes of a number in the gradients of keys and values that context ranks sum (0: as
    an activation's)."""

    flash: bool = True
    skips: bool = True
    regathers: bool = True
    expands: bool = False
    again: tuple[str, ...] = ()
    dropout: bool = False
    norm: float = 2
    norm_kept: float = 1
    activation: float = 3
    gelu: float = 2
    activation_kept: float = 2
    residual: float = 3
    rope: float = 2
    scores: float = 5
    loss_bytes: float = 16
    loss_kept: float = 10
    casts: float = 2
    grouped: float = 0.8
    kernels: float = 16
    expert_kernels: float = 100
    ring_gradient: float = 0


class Split(NamedTuple):
    """Degrees of the ranks that share a sample, and of experts; beyond their number tensor ranks divide each."""

    tensor: int = 1
    sequence_parallel: bool = False
    context: int = 1
    expert: int = 1

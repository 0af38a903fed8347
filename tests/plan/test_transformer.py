"""Transformers from shapes: weights, FLOPs, bytes kept and sent against the papers' formulas."""

import pytest

from shoal.plan.shapes import Experts, Latent, Mamba, Shape, Software, Split
from shoal.plan.transformer import model_flops, profile

pytestmark = pytest.mark.unit
LLAMA_8B = Shape("Llama-3-8B", 32, 4096, 32, 8, 14336, 128256)
GPT = Shape("GPT", 24, 1024, 16, 16, 4096, 50304, gated=False, tied=True, learned=1024)
DEEPSEEK = Shape("DeepSeek-V3", 61, 7168, 128, 128, 18432, 129280, head_dim=128,
                 experts=Experts(256, 8, 2048, 2048, 3, 18432), latent=Latent(1536, 512, 64, 128))  # fmt: skip
MIXTRAL = Shape("Mixtral-8x7B", 32, 4096, 32, 8, 14336, 32000, experts=Experts(8, 2, 14336))
S = 4096


def layer(made):
    return made.blocks[1]


def kept(block):
    return sum(op.kept_bytes for op in block.ops)


@pytest.mark.parametrize(
    ("shape", "billions"),
    [(LLAMA_8B, 8.03), (GPT, 0.355), (DEEPSEEK, 671.0), (MIXTRAL, 46.7)],
    ids=lambda v: str(v)[:12],
)
def test_parameters_are_the_published_ones(shape, billions):
    assert profile(shape, 1024).parameters / 1e9 == pytest.approx(billions, rel=0.006)


def test_degrees_divide_weights_and_experts():
    whole, split = profile(MIXTRAL, S), profile(MIXTRAL, S, Split(tensor=2, expert=4))
    experts = [w.numel for b in whole.blocks for w in b.weights if w.expert]
    assert [w.numel for b in split.blocks for w in b.weights if w.expert] == [numel // 4 for numel in experts]
    assert profile(LLAMA_8B, S, Split(tensor=8)).parameters == pytest.approx(8.03e9 / 8, rel=0.01)


def test_flops_are_six_per_parameter_and_token_and_those_of_attention():
    products = 8.03e9 - 128256 * 4096  # the embedding multiplies nothing
    full = 2 * products + 4 * 32 * S * 4096
    assert model_flops(LLAMA_8B, S) / S == pytest.approx(full, rel=0.002)
    half = 2 * products + 2 * 32 * S * 4096
    assert model_flops(LLAMA_8B, S, 0.5) / S == pytest.approx(half, rel=0.002)
    assert profile(LLAMA_8B, S, Split(tensor=8)).model_flops == model_flops(LLAMA_8B, S)
    active = 2 * 4096 * (32 + 8) * 128 + 3 * 4096 * 2 * 14336 + 4096 * 8  # attention, two experts, router
    by_hand = 32 * (2 * active + 4 * S * 4096) + 2 * 4096 * 32000
    assert model_flops(MIXTRAL, S) / S == pytest.approx(by_hand, rel=0.002)


def test_a_layer_keeps_12h_and_4gh_and_8f_bytes_per_token():
    """Llama-type, RMSNorm, grouped queries, SwiGLU not fused, flash attention: 41 h for Llama-3-8B."""
    made = profile(LLAMA_8B, S, software=Software(activation_kept=3))
    logsumexp = 4 * 32
    assert kept(layer(made)) / S == pytest.approx(41 * 4096 + logsumexp, rel=1e-6)


def test_eager_gpt_keeps_34h_and_5as():
    """Korthikanti et al., https://arxiv.org/abs/2205.05198, equation 1: sbh (34 + 5 a s / h) with dropout."""
    made = profile(GPT, 1024, software=Software(flash=False, dropout=True))
    by_hand = 1024 * (34 + 5 * 16 * 1024 / 1024)
    extra = 4 * 16  # the softmax's statistics, where attention is fused
    assert kept(layer(made)) / 1024 == pytest.approx(by_hand + extra, rel=0.01)


def test_attention_alone_computed_again_keeps_34h_and_costs_one_more_forward():
    """The same paper, equation 6: its selective recomputation keeps no scores."""
    made = profile(GPT, 1024, software=Software(flash=False, dropout=True, again=("attention",)))
    assert kept(layer(made)) / 1024 == pytest.approx(1024 * 34 + 4 * 16, rel=0.01)
    attention = {op.name: op for op in layer(made).ops}["attention"]
    assert attention.backward == 3.5


def test_sequence_parallelism_divides_all_that_is_kept_if_inputs_are_gathered_anew():
    whole = kept(layer(profile(LLAMA_8B, S)))
    shared = kept(layer(profile(LLAMA_8B, S, Split(tensor=8, sequence_parallel=True))))
    assert shared == pytest.approx(whole / 8)
    held = profile(LLAMA_8B, S, Split(tensor=8, sequence_parallel=True), software=Software(regathers=False))
    assert kept(layer(held)) - shared == pytest.approx(2 * 2 * S * 4096 * 7 / 8)
    plain = kept(layer(profile(LLAMA_8B, S, Split(tensor=8))))
    assert plain - shared == pytest.approx(8 * S * 4096 * 7 / 8)


def test_tensor_collectives_of_a_layer():
    def calls(split):
        return sorted((t.collective, t.phase) for t in layer(profile(LLAMA_8B, S, split)).traffic)

    assert calls(Split()) == []
    assert calls(Split(tensor=4)) == [("all_reduce", "backward")] * 2 + [("all_reduce", "forward")] * 2
    both = [("all_gather", "backward")] * 4 + [("all_gather", "forward")] * 2
    scatters = [("reduce_scatter", "backward")] * 2 + [("reduce_scatter", "forward")] * 2
    assert calls(Split(tensor=4, sequence_parallel=True)) == both + scatters
    assert layer(profile(LLAMA_8B, S, Split(tensor=4))).traffic[0].bytes == 2 * S * 4096


def test_experts_exchange_each_tokens_rows_and_context_ranks_keys():
    made = layer(profile(MIXTRAL, S, Split(expert=8, context=2)))
    rows = [t for t in made.traffic if t.axis == "expert"]
    assert [(t.collective, t.bytes, t.copies) for t in rows] == [("all_to_all", 2 * 2 * (S / 2) * 4096, 2)] * 4
    keys = [t for t in made.traffic if t.axis == "context"]
    assert [t.bytes for t in keys] == [2 * 2 * S * 8 * 128] * 3
    assert made.waits > 0
    assert layer(profile(LLAMA_8B, S)).waits == 0


def test_fp8_keeps_inputs_in_a_byte_casts_them_and_leaves_attention_router_and_head_in_bf16():
    wide, narrow = profile(MIXTRAL, S), profile(MIXTRAL, S, precision="fp8")
    assert kept(layer(narrow)) < kept(layer(wide))
    kinds = {op.name: op.precision for block in narrow.blocks for op in block.ops}
    assert {kinds[name] for name in ("attention", "router", "head")} == {"bf16"}
    assert kinds["qkv"] == "" and "casts" in kinds


def test_single_mixers_windows_and_kinds():
    hybrid = Shape("h", 4, 1024, 8, 2, 2048, 32000, gated=False, pattern="ME*-", experts=Experts(8, 2, 512),
                   mamba=Mamba(2048, 128, 8, 32))  # fmt: skip
    assert [b.kind for b in profile(hybrid, S).blocks[1:-1]] == ["mamba", "experts", "attention", "feed-forward"]
    every_second = LLAMA_8B._replace(window=128)
    kinds = [block.kind for block in profile(every_second, S).blocks[1:5]]
    assert kinds == ["dense", "dense-window"] * 2
    flops = [
        sum(op.flops for op in block.ops if op.kind == "attention") for block in profile(every_second, S).blocks[1:3]
    ]
    assert flops[1] == pytest.approx(flops[0] * 128 / (S / 2))
    names = [w.name for block in profile(LLAMA_8B, S).blocks for w in block.weights]
    assert len(set(names)) == len(names)


def test_experts_products_fill_the_device_together():
    made = layer(profile(MIXTRAL, S, Split(expert=4)))
    up = next(op for op in made.ops if op.name == "expert_up")
    assert (up.m, up.flops) == (2 * S, pytest.approx(2 * 2 * S * 4096 * 2 * 14336 / 0.8))


def test_parts_of_a_layer_that_are_computed_again_are_not_kept_and_run_once_more():
    def made(*parts, shape=LLAMA_8B, expert=1):
        return layer(profile(shape, S, Split(expert=expert), software=Software(again=parts)))

    h, f = LLAMA_8B.hidden, LLAMA_8B.ffn
    parts = ("layernorm", "act", "mlp")
    assert [kept(made()) - kept(made(part)) for part in parts] == [2 * 2 * h * S, 2 * f * S, 6 * f * S]
    again = {op.name: op.backward for op in made("mlp").ops}
    assert [again[name] for name in ("ffn_up", "ffn_activation", "qkv")] == [3, 2.5, 2]
    plain, moe = (made(*parts, shape=MIXTRAL, expert=4) for parts in ((), ("moe",)))
    rows = [[one.phase for one in block.traffic if one.axis == "expert"] for block in (plain, moe)]
    assert [phases.count("backward") for phases in rows] == [2, 4] and rows[0] == rows[1][:4]
    assert kept(plain) - kept(moe) == (2 * (2 * h + 6 * f) - 2 * h) * S  # two experts' rows; the input stays
    assert moe.again_bytes == kept(plain) - kept(moe) and not plain.again_bytes


def test_keys_and_values_copied_to_all_heads_are_kept_so():
    plain, copied = (kept(layer(profile(LLAMA_8B, S, software=Software(expands=e)))) for e in (False, True))
    assert copied - plain == 2 * 2 * (32 - 8) * 128 * S


def test_operations_alone_computed_again_keep_a_layers_input_and_every_second_product():
    """torchtitan keeps query, value, gate and down of seven products, and attention's result."""
    h, f, kv = 4096, 14336, 8 * 128
    made, whole = (layer(profile(LLAMA_8B, S, software=Software(again=again))) for again in (("operations",), ()))
    assert kept(made) == S * (2 * (h + h + kv + h + f + h) + 4 * 32)
    again = {op.name: op.backward for op in made.ops}
    plain = {op.name: op.backward for op in whole.ops}
    runs = {"attention": 0, "ffn_down": 0, "ffn_up": 0.5, "qkv": kv / (h + 2 * kv)}
    assert {name: again[name] - plain[name] for name in plain} == pytest.approx(
        {name: runs.get(name, 1) for name in plain}
    )
    old = layer(profile(GPT, S, software=Software(again=("operations",))))
    assert [op.backward for op in old.ops if op.name in ("ffn_up", "ffn_down")] == [2, 3]
    mixed = layer(profile(MIXTRAL, S, software=Software(again=("operations",))))
    assert kept(mixed) == S * (2 * (h + h + kv + h) + 4 * 32)  # nothing of experts
    assert made.again_bytes == kept(whole) - kept(made)


def test_context_ranks_exchange_keys_of_all_heads_where_these_are_copied_before():
    software = Software(expands=True, ring_gradient=4)
    keys = [t for t in layer(profile(LLAMA_8B, S, Split(context=2), software=software)).traffic if t.axis == "context"]
    assert [t.bytes for t in keys] == [2 * 2 * S * 32 * 128] * 2 + [2 * 4 * S * 32 * 128]


def test_more_expert_ranks_than_experts_divide_each_over_tensor_ranks_that_share_its_rows():
    whole, parts = (layer(profile(MIXTRAL, S, Split(2, True, expert=ranks))) for ranks in (8, 16))
    held = [sum(w.numel for w in block.weights if w.expert) for block in (whole, parts)]
    flops = [sum(op.flops for op in block.ops) for block in (whole, parts)]
    assert held[0] == 2 * held[1] and flops[0] == pytest.approx(flops[1])
    shared = [t for t in parts.traffic if t.axis == "tensor"][len([t for t in whole.traffic if t.axis == "tensor"]) :]
    rows = next(t.bytes for t in parts.traffic if t.axis == "expert")
    assert sorted((t.collective, t.phase, t.bytes) for t in shared) == [
        (kind, phase, 2 * rows) for kind in ("all_gather", "reduce_scatter") for phase in ("backward", "forward")
    ]

"""Derived roles are those of the tensor plans that Hugging Face configurations carry; what differs is named."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shoal.blueprint.agreement import differences
from shoal.blueprint.roles import Roles, roles
from shoal.blueprint.trace import trace

pytestmark = pytest.mark.unit

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 32, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "batched_mm"}
#: Configuration -> what its settings add, and the patterns whose roles are others on two ranks.
FAMILIES = {
    "Llama": ({}, {}),
    "Qwen2": ({}, {}),
    "Qwen3": ({}, {}),
    "Mistral": ({}, {}),
    "Mixtral": (EXPERTS, {}),
    "Olmo": ({}, {}),
    # its norms are over all heads' queries: the plan gathers them, here they are whole from the start
    "Olmo2": ({}, dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj"), "mean works along the split dimension")),
    "Gemma": ({}, {}),
    "Phi": ({}, {}),
    "Phi3": ({}, {}),
    "GPTNeoX": ({}, {}),
    "Granite": ({}, {}),
    "Starcoder2": ({}, {}),
    "Glm4": ({}, {}),
}


def derived(name: str, degree: int) -> tuple[Roles, dict[str, str]]:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(**SIZES, **FAMILIES[name][0])
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    blueprint = trace(model, (), {"input_ids": torch.zeros(2, 8, dtype=torch.long)}, samples=2)
    return roles(blueprint, degree), config.base_model_tp_plan


@pytest.mark.parametrize("name", list(FAMILIES))
def test_roles_agree_with_the_plan_of_the_configuration(name):
    found, plan = derived(name, 2)
    expected = FAMILIES[name][1]
    told = differences(found, plan)
    assert len(told) == len(expected), told
    for (pattern, reason), line in zip(expected.items(), told, strict=True):
        assert line.startswith(
            f"layers.*.{pattern} is {plan['layers.*.' + pattern]} in the configuration's tensor plan"
        )
        assert f"{pattern}" in line and reason in line


def test_key_value_heads_fewer_than_the_degree_are_the_difference_that_is_told():
    found, plan = derived("Llama", 4)
    told = differences(found, plan)
    assert [line.partition(" is ")[0] for line in told] == ["layers.*.self_attn.k_proj", "layers.*.self_attn.v_proj"]
    assert all("2 (heads) cannot be divided among 4" in line for line in told)


def test_patterns_that_name_nothing_say_nothing_and_unknown_styles_are_told():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    found = roles(trace(model, (torch.zeros(2, 8),), {}), 2)
    assert differences(found, {"0": "colwise", "*": "colwise", "up": "colwise"}) == [
        "* is colwise in the configuration's tensor plan, 2.weight is row"
    ]
    assert differences(found, {"2": "rowwise", "0": "diagonal"}) == [
        "0 is diagonal in the configuration's tensor plan, which is no known style"
    ]

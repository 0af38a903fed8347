"""A Hugging Face model's local folder, read straight into each rank's part."""

from __future__ import annotations

import pytest
import torch
from tests.harness import run_ranks
from tests.small_jobs import Rows
from tests.starting import SLACK_BYTES, compare, largest_weight, share_of, watched
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from shoal.engine.randomness import seed_all
from shoal.launch.jobfile import load_class

pytestmark = pytest.mark.ranks

SIZES = {"vocab_size": 256, "bos_token_id": None, "eos_token_id": None}


class Short(load_class("examples/hf_llama.py")):
    """The example on a few rows."""

    def data(self):
        return Rows([(torch.arange(16) + place, torch.arange(1, 17) + place) for place in range(8)])


def llama():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **sizes, tie_word_embeddings=True)).bfloat16()


def gpt2():
    return GPT2LMHeadModel(GPT2Config(**SIZES, n_embd=32, n_layer=3, n_head=4, n_positions=64))


@pytest.mark.parametrize(
    ("make", "part", "meshes"),
    [(llama, None, (None, "shard=2", "pipeline=2", "tensor=2")), (gpt2, "transformer", ("pipeline=2",))],
)
def test_a_folder_is_read_into_each_part_and_nothing_is_drawn(tmp_path, make, part, meshes):
    """Several files with an index; tied; bfloat16 in files and float32 masters; or the inner model's names alone.

    https://github.com/meta-pytorch/torchtune/issues/616
    """
    torch.manual_seed(4)
    made = make()
    folder = tmp_path / "given"
    saved = made if part is None else made.get_submodule(part)
    saved.save_pretrained(folder, max_shard_size="40KB")
    if part is not None:
        made.config.save_pretrained(folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    wanted = {name: tensor.detach().float() for name, tensor in made.named_parameters()}
    wanted |= {name: tensor.detach() for name, tensor in AutoModelForCausalLM.from_config(made.config).named_buffers()}
    weight = largest_weight(made.float())

    def body(rank):
        for mesh in meshes:
            run, most, draws = watched(Short(weights=str(folder), context=16), tmp_path / str(mesh), mesh=mesh)
            compare(run, wanted)
            if mesh is not None:
                assert not draws and most <= share_of(run) + weight + SLACK_BYTES, mesh

    run_ranks(body, 2, timeout_s=120)


def test_random_weights_are_those_of_the_model_and_no_rank_builds_it_whole(tmp_path):
    made = Short(layers=3, width=32, heads=4, context=16)
    weight = largest_weight(made.model())

    def body(rank):
        seed_all(0)
        whole = made.model()
        wanted = {name: tensor.detach() for name, tensor in [*whole.named_parameters(), *whole.named_buffers()]}
        for mesh in ("shard=2", "pipeline=2", "tensor=2"):
            run, most, _ = watched(made, tmp_path / mesh, mesh=mesh)
            compare(run, wanted)
            assert most <= share_of(run) + weight + SLACK_BYTES, mesh

    run_ranks(body, 2, timeout_s=120)

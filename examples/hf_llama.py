"""Any causal language model of Hugging Face transformers by its configuration, under any mesh.

shoal train examples/hf_llama.py --mesh pipeline=2
shoal verify examples/hf_llama.py layers=2 width=32 context=16 --world 4
shoal plan examples/hf_llama.py layers=80 width=8192 heads=64 kv_heads=8 ffn=28672 vocabulary=128256 context=8192 \
    --cluster h100 --world 512 --global-batch 512 --precision bf16
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch.utils.data import Subset
from transformers import AutoConfig, AutoModelForCausalLM

import shoal
from shoal.data.sources.stdlib import stdlib_files
from shoal.data.sources.text import TextBytes


class Job(shoal.Job):
    """Predict the next byte of Python code with random weights, or go on from the weights in a local folder."""

    defaults: ClassVar[dict] = {"steps": 200, "global_batch": 16, "clip": 1.0}

    family: str = "llama"  # a name that transformers' AutoConfig knows: llama, qwen3, mistral, gpt_neox, opt, ...
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 0  # 0: half as many as heads
    ffn: int = 0  # 0: 4 x width
    vocabulary: int = 256
    context: int = 128
    weights: str = ""  # a folder with config.json and safetensors; the sizes are then its own
    lr: float = 1e-3
    eval_sequences: int = 200

    def model(self):
        if self.weights:
            known = AutoConfig.from_pretrained(self.weights, local_files_only=True, use_cache=False)
            return AutoModelForCausalLM.from_config(known)
        sizes = {
            "vocab_size": self.vocabulary, "hidden_size": self.width, "num_hidden_layers": self.layers,
            "use_cache": False, "num_attention_heads": self.heads,
            "max_position_embeddings": self.context, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
        }  # fmt: skip
        known = AutoConfig.for_model(self.family)
        if hasattr(known, "intermediate_size"):
            sizes["intermediate_size"] = self.ffn or 4 * self.width
        if hasattr(known, "num_key_value_heads"):
            sizes["num_key_value_heads"] = self.kv_heads or max(1, self.heads // 2)
        if getattr(known, "head_dim", None):
            sizes["head_dim"] = self.width // self.heads
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(self.family, **sizes))

    def init_from(self):
        return self.weights or None  # read straight into each worker's part of the model

    def data(self):
        return TextBytes(stdlib_files(held_out=False), self.context)

    def eval_data(self):
        text = TextBytes(stdlib_files(held_out=True), self.context)
        return Subset(text, range(0, len(text), max(1, len(text) // self.eval_sequences)))

    def inputs(self, batch):
        ids, targets = batch
        return {"input_ids": ids}, targets

    def loss(self, output, targets):
        total = F.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return shoal.Loss(total, targets.numel())

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

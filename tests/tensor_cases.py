"""Tiny models of many families, for the tests of tensor parallelism: ours and Hugging Face's, random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.tensor_training import Case
from torch import Tensor, nn

from shoal.models import GPT, ViT

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}


def ids(key: str = "ids", vocabulary: int = 64) -> dict[str, Any]:
    """Token ids [2, 8]."""
    return {key: torch.randint(0, vocabulary, (2, 8), generator=torch.Generator().manual_seed(1))}


def images(key: str) -> dict[str, Any]:
    """Grey images."""
    shape = (2, 8, 8) if key == "images" else (2, 1, 8, 8)
    return {key: torch.rand(*shape, generator=torch.Generator().manual_seed(1)).double()}


def decoded(**first: Any) -> dict[str, Any]:
    """Inputs of an encoder and a decoder."""
    return first | {"decoder_input_ids": (torch.arange(12) * 5 % 64).view(2, 6)}


def whisper_inputs() -> dict[str, Any]:
    """Spectrograms and a decoder's ids."""
    return decoded(input_features=torch.rand(2, 8, 16, generator=torch.Generator().manual_seed(2)).double())


def cross_entropy(output: Any) -> Tensor:
    """The mean over fixed targets, of a tensor or of a model's output that has logits."""
    logits = output if isinstance(output, Tensor) else output.logits
    logits = logits.flatten(0, -2)
    return F.cross_entropy(logits, torch.arange(len(logits)) * 7 % logits.shape[-1])


class EncoderDecoder(nn.Module):
    """torch's own transformer, with a causal and a padding mask."""

    def __init__(self) -> None:
        super().__init__()
        self.both = nn.Transformer(32, 4, 2, 2, 64, dropout=0.1, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Both stacks; source, target: [B, T, D]."""
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1]).double()
        padding = torch.arange(source.shape[1]).expand(source.shape[:2]) >= torch.tensor([[3], [4]])
        return self.both(source, target, tgt_mask=mask, tgt_is_causal=True, src_key_padding_mask=padding)


class Experts(nn.Module):
    """Experts with stacked weights: picked for each row, and all of them in einsums."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"both": (4, 24, 16), "down": (4, 16, 12), "up": (4, 16, 12), "back": (4, 12, 16), "last": (16, 9)}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(*shape) / 4))

    def forward(self, x: Tensor) -> Tensor:
        """Class scores; x: [B, D]."""
        picked = x.detach().argmax(-1) % 4
        gate, up = torch.bmm(self.both[picked], x.unsqueeze(-1)).squeeze(-1).chunk(2, -1)
        x = x + torch.bmm(self.down[picked], (F.silu(gate) * up).unsqueeze(-1)).squeeze(-1)
        inner = F.gelu(torch.einsum("bd,edh->beh", x, self.up))
        x = x + torch.einsum("beh,ehd,be->bd", inner, self.back, x[:, :4].softmax(-1))
        return x @ self.last


def convolutions() -> nn.Module:
    """Images, four groups of channels, and classes at each place."""
    inner = nn.Sequential(nn.Conv2d(1, 12, 3, stride=2), nn.GroupNorm(4, 12), nn.SiLU(), nn.Conv2d(12, 8, 3, padding=1))
    return nn.Sequential(inner, nn.Flatten(2), nn.Conv1d(8, 16, 1), nn.ReLU(), nn.Conv1d(16, 9, 1, bias=False))


def sequences() -> dict[str, Any]:
    """Two sequences of vectors."""
    generator = torch.Generator().manual_seed(1)
    shapes = {"source": (2, 5, 32), "target": (2, 6, 32)}
    return {name: torch.rand(*shape, generator=generator).double() for name, shape in shapes.items()}


OWN = {
    "gpt": Case(lambda: GPT(64, 32, 2, 4, 16), ids, cross_entropy),
    "gpt tied with dropout": Case(lambda: GPT(64, 32, 2, 4, 16, dropout=0.2, tied=True), ids, cross_entropy),
    "gpt of a prime vocabulary": Case(
        lambda: GPT(61, 32, 2, 4, 16, tied=True), lambda: ids(vocabulary=61), cross_entropy
    ),
    "torch's transformer": Case(EncoderDecoder, sequences, cross_entropy),
    "vit": Case(ViT, lambda: images("images"), cross_entropy),
}

#: Of no sequence's positions.
WITHOUT_POSITIONS = {
    "experts": Case(Experts, lambda: {"x": sequences()["source"][0, :, :16]}, cross_entropy),
    "convolutions": Case(convolutions, lambda: {"input": images("pixel_values")["pixel_values"]}, cross_entropy),
}

#: family -> (model class, configuration class, its settings, inputs)
FAMILIES: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", SIZES | {"num_key_value_heads": 2}, lambda: ids("input_ids")),
    "llama eager": (
        "LlamaForCausalLM", "LlamaConfig", SIZES | {"num_key_value_heads": 2, "attn_implementation": "eager"},
        lambda: ids("input_ids"),
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", SIZES | {"num_key_value_heads": 2}, lambda: ids("input_ids")),
    "gemma": (
        "GemmaForCausalLM", "GemmaConfig", SIZES | {"num_key_value_heads": 2, "head_dim": 8}, lambda: ids("input_ids")
    ),
    "qwen3": (
        "Qwen3ForCausalLM", "Qwen3Config", SIZES | {"num_key_value_heads": 2, "head_dim": 8}, lambda: ids("input_ids")
    ),
    "phi": ("PhiForCausalLM", "PhiConfig", SIZES, lambda: ids("input_ids")),
    "phi3": (
        "Phi3ForCausalLM", "Phi3Config", SIZES | {"num_key_value_heads": 2, "pad_token_id": 0}, lambda: ids("input_ids")
    ),
    "olmo": ("OlmoForCausalLM", "OlmoConfig", SIZES, lambda: ids("input_ids")),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2_SIZES, lambda: ids("input_ids")),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES, lambda: ids("input_ids")),
    "opt": (
        "OPTForCausalLM", "OPTConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48,
         "max_position_embeddings": 32, "word_embed_proj_dim": 32},
        lambda: ids("input_ids"),
    ),
    "bloom": (
        "BloomForCausalLM", "BloomConfig", {"vocab_size": 64, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        lambda: ids("input_ids"),
    ),
    "falcon": (
        "FalconForCausalLM", "FalconConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 8, "num_kv_heads": 4,
         "new_decoder_architecture": True},
        lambda: ids("input_ids"),
    ),
    "falcon of one key-value head": (
        "FalconForCausalLM", "FalconConfig",
        {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "multi_query": True},
        lambda: ids("input_ids"),
    ),
    "bert": ("BertForMaskedLM", "BertConfig", SIZES, lambda: ids("input_ids")),
    "distilbert": (
        "DistilBertForMaskedLM", "DistilBertConfig",
        {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 32},
        lambda: ids("input_ids"),
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
        lambda: decoded(**ids("input_ids")),
    ),
    "whisper": (
        "WhisperForConditionalGeneration", "WhisperConfig",
        {"vocab_size": 64, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
         "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 8,
         "max_source_positions": 8, "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1,
         "eos_token_id": 2, "decoder_start_token_id": 1},
        whisper_inputs,
    ),
    "hf vit": (
        "ViTForImageClassification", "ViTConfig",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 8,
         "patch_size": 2, "num_channels": 1},
        lambda: images("pixel_values"),
    ),
}  # fmt: skip


def family(name: str) -> Case:
    """A Hugging Face family's case."""
    import transformers

    model, config, settings, inputs = FAMILIES[name]
    return Case(lambda: getattr(transformers, model)(getattr(transformers, config)(**settings)), inputs, cross_entropy)


def llama(**settings: Any) -> Case:
    """A Llama of other sizes."""
    import transformers

    return Case(
        lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings)), lambda: ids("input_ids"),
        cross_entropy,
    )  # fmt: skip

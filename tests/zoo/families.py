"""Tiny models of many families, each with random weights, dropout 0, and data that never changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tests.zoo.plain import Fourier, Mixer, Perceptron, Seq2Seq, UNet
from torch import Tensor, nn

from shoal import Loss

SAMPLES, LENGTH, VOCABULARY, CLASSES, IGNORED = 8, 8, 64, 8, -100


class Family(NamedTuple):
    """A model, its samples (inputs by keyword, targets), and its loss."""

    model: Callable[[], nn.Module]
    samples: Callable[[], list[Any]]
    loss: Callable[[Any, Tensor], Loss]


def items_loss(output: Any, targets: Tensor) -> Loss:
    """Cross-entropy of logits [..., classes], summed over the targets that count."""
    logits = output if isinstance(output, Tensor) else output["logits"]
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(total, (targets != IGNORED).sum())


def square_loss(output: Tensor, targets: Tensor) -> Loss:
    """Squared error, summed."""
    return Loss(((output - targets) ** 2).sum(), targets.numel())


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def _ids(generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (length,), generator=generator)


def _uneven(targets: Tensor, place: int) -> Tensor:
    targets = targets.clone()
    targets[len(targets) - place % 4 :] = IGNORED
    return targets


def _mask(place: int) -> Tensor:
    return (torch.arange(LENGTH) < LENGTH - place % 4).long()


def tokens(mask: bool = True) -> list[Any]:
    """Token ids and the next ones, of uneven lengths; ``mask``: padding is told to the model."""
    generator, found = _generator(), []
    for place in range(SAMPLES):
        ids = _ids(generator, LENGTH + 1)
        more = {"attention_mask": _mask(place)} if mask else {}
        found.append(({"input_ids": ids[:-1], **more}, _uneven(ids[1:], place)))
    return found


def translations() -> list[Any]:
    """Ids for an encoder, with padding, and for a decoder."""
    generator = _generator()
    return [
        (
            {"input_ids": _ids(generator), "attention_mask": _mask(place), "decoder_input_ids": _ids(generator, 6)},
            _uneven(_ids(generator, 6), place),
        )
        for place in range(SAMPLES)
    ]


def speech() -> list[Any]:
    """Spectrograms for an encoder, ids for a decoder."""
    generator = _generator()
    return [
        (
            {"input_features": torch.rand(8, 16, generator=generator), "decoder_input_ids": _ids(generator, 6)},
            _uneven(_ids(generator, 6), place),
        )
        for place in range(SAMPLES)
    ]


def numbers(key: str, *shape: int, classes: int = CLASSES) -> list[Any]:
    """Images or vectors and a class of each."""
    generator = _generator()
    return [({key: torch.rand(*shape, generator=generator)}, torch.tensor(at % classes)) for at in range(SAMPLES)]


def fields(*shape: int) -> list[Any]:
    """Fields and others to be learnt from them."""
    generator = _generator()
    return [({"x": torch.rand(*shape, generator=generator)}, torch.rand(*shape, generator=generator)) for _ in range(8)]


def sequences() -> list[Any]:
    """Two sequences of vectors, and classes of the second's places."""
    generator = _generator()
    return [
        (
            {"source": torch.rand(5, 16, generator=generator), "target": torch.rand(6, 16, generator=generator)},
            _uneven(torch.randint(CLASSES, (6,), generator=generator), place),
        )
        for place in range(SAMPLES)
    ]


def hugging_face(model: str, config: str, samples: Callable[[], list[Any]] = tokens, **settings: Any) -> Family:
    """A family of transformers, from its configuration alone."""

    def made() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**settings))

    return Family(made, samples, items_loss)


PLAIN: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "pad_token_id": 0}
SIZES: dict[str, Any] = {
    **PLAIN, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "max_position_embeddings": 32,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
ENCODER = {key: value for key, value in SIZES.items() if key != "use_cache"}

FAMILIES: dict[str, Family] = {
    "llama": hugging_face("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen3": hugging_face("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=4),
    "mistral": hugging_face("MistralForCausalLM", "MistralConfig", **GROUPED),
    "gemma3": hugging_face(
        "Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=4, sliding_window=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "olmo": hugging_face("OlmoForCausalLM", "OlmoConfig", **SIZES),
    "phi": hugging_face("PhiForCausalLM", "PhiConfig", **SIZES),
    "phi3": hugging_face("Phi3ForCausalLM", "Phi3Config", **GROUPED),
    "mixtral": hugging_face(
        "MixtralForCausalLM", "MixtralConfig", **GROUPED, num_local_experts=4, experts_implementation="batched_mm",
    ),
    "gpt2": hugging_face(
        "GPT2LMHeadModel", "GPT2Config", **PLAIN, n_embd=16, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0,
    ),
    "gpt_neox": hugging_face("GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES),
    "opt": hugging_face(
        "OPTForCausalLM", "OPTConfig", **PLAIN, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, word_embed_proj_dim=16, dropout=0.0,
    ),
    "bloom": hugging_face("BloomForCausalLM", "BloomConfig", **PLAIN, hidden_size=16, n_layer=2, n_head=4),
    "falcon": hugging_face(
        "FalconForCausalLM", "FalconConfig", **PLAIN, hidden_size=32, num_hidden_layers=2, num_attention_heads=8,
        num_kv_heads=4, new_decoder_architecture=True,
    ),
    "bert": hugging_face(
        "BertForMaskedLM", "BertConfig", **ENCODER, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "distilbert": hugging_face(
        "DistilBertForMaskedLM", "DistilBertConfig", vocab_size=VOCABULARY, dim=16, n_layers=2, n_heads=4,
        hidden_dim=24, max_position_embeddings=32, dropout=0.0, attention_dropout=0.0,
    ),
    "t5": hugging_face(
        "T5ForConditionalGeneration", "T5Config", translations, **PLAIN, d_model=16, d_kv=4, d_ff=24, num_layers=2,
        num_heads=4, decoder_start_token_id=0, dropout_rate=0.0,
    ),
    "whisper": hugging_face(
        "WhisperForConditionalGeneration", "WhisperConfig", speech, **PLAIN, d_model=16, encoder_layers=2,
        decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=24, decoder_ffn_dim=24,
        num_mel_bins=8, max_source_positions=8, max_target_positions=16, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, dropout=0.0,
    ),
    "vit": hugging_face(
        "ViTForImageClassification", "ViTConfig", lambda: numbers("pixel_values", 1, 8, 8), hidden_size=16,
        num_hidden_layers=2, num_attention_heads=4, intermediate_size=24, image_size=8, patch_size=4, num_channels=1,
        num_labels=CLASSES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ),
    "resnet": hugging_face(
        "ResNetForImageClassification", "ResNetConfig", lambda: numbers("pixel_values", 1, 16, 16), num_channels=1,
        embedding_size=4, hidden_sizes=[4, 8], depths=[2, 2], layer_type="basic", num_labels=CLASSES,
    ),
    "nn.Transformer": Family(Seq2Seq, sequences, items_loss),
    "MLP": Family(Perceptron, lambda: numbers("x", 12), items_loss),
    "MLP-Mixer": Family(Mixer, lambda: numbers("x", 1, 8, 8), items_loss),
    "U-Net": Family(UNet, lambda: fields(1, 8, 8), square_loss),
    "Fourier operator": Family(Fourier, lambda: fields(16, 1), square_loss),
}  # fmt: skip

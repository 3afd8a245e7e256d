"""Small transformers for the parity tests, drawn from configurations; nothing is downloaded.

transformers is imported when a model is drawn, not before.
"""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

Drawn = tuple[nn.Module, dict[str, Tensor]]

VOCABULARY = 256


def _from_config(model_name: str, config_name: str, **config: Any) -> nn.Module:
    transformers = importlib.import_module("transformers")
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**config))
    return model.train()


def _tokens(batch: int, length: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length))


def llama(*, tied: bool = False, attention_dropout: float = 0.0) -> Drawn:
    model = _from_config(
        "LlamaForCausalLM",
        "LlamaConfig",
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=tied,
        attention_dropout=attention_dropout,
        use_cache=False,
    )
    tokens = _tokens(2, 192)
    return model, {"input_ids": tokens, "labels": tokens}


def llama_tied() -> Drawn:
    return llama(tied=True)


def llama_checkpointed() -> Drawn:
    model, inputs = llama()
    enable = getattr(model, "activation_checkpointing_enable", None)
    enable = enable or model.gradient_checkpointing_enable  # its name before Transformers 5.23
    enable({"use_reentrant": False})
    return model, inputs


def gpt2() -> Drawn:
    """With dropout, whose saved masks are bool, and attention written out in matmuls."""
    model = _from_config(
        "GPT2LMHeadModel",
        "GPT2Config",
        vocab_size=VOCABULARY,
        n_positions=256,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        attn_implementation="eager",
    )
    tokens = _tokens(2, 192)
    return model, {"input_ids": tokens, "labels": tokens}


def vit() -> Drawn:
    model = _from_config(
        "ViTForImageClassification",
        "ViTConfig",
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=4,
        num_labels=10,
    )
    return model, {"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.tensor([3, 7])}


def t5() -> Drawn:
    model = _from_config(
        "T5ForConditionalGeneration",
        "T5Config",
        vocab_size=VOCABULARY,
        d_model=64,
        d_kv=16,
        d_ff=160,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return model, {"input_ids": _tokens(2, 160), "labels": _tokens(2, 128)}

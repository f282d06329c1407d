"""A mixture of experts that fits a test: Qwen3-MoE with six experts, two of them for a token."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def make_model(path: str) -> torch.nn.Module:
    """Random weights, also saved under `path` as checkpoint files, which name each expert."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=128, intermediate_size=96, moe_intermediate_size=64, num_experts=6, head_dim=32,
        num_experts_per_tok=2, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=1024, tie_word_embeddings=False, eos_token_id=1, bos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(path)
    return model

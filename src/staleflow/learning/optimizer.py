"""AdamW over sharded parameters, its learning-rate schedule, and gradient clipping."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from staleflow.learning.settings import OptimizerSettings


def learning_rate(step: int, settings: OptimizerSettings) -> float:
    """Learning rate of training step `step` (from 0): linear warm-up, then constant, linear or cosine decay."""
    s = settings
    if step < s.warmup_steps:
        return s.lr * (step + 1) / s.warmup_steps
    if s.schedule == "constant":
        return s.lr
    progress = min(1.0, (step - s.warmup_steps) / (s.total_steps - s.warmup_steps))
    shape = 1 - progress if s.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return s.lr * (s.min_lr_fraction + (1 - s.min_lr_fraction) * shape)


def build(model: nn.Module, settings: OptimizerSettings) -> torch.optim.AdamW:
    """Weight decay on matrices only: norms and biases are not to be pulled to zero."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def clip_gradients(parameters: Iterable[torch.Tensor], max_norm: float) -> float:
    """Scale the gradients to a global norm of at most `max_norm` (0: only measure); returns the norm before."""
    norm = nn.utils.clip_grad_norm_(parameters, max_norm or math.inf)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

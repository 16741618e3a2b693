"""Our paged attention as an attention implementation of `transformers` models."""

from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface

ATTENTION_NAME = "handed_over"


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    paged: Any,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention interface of `transformers`: `query` is [1, head, tokens, head_dim]."""
    output = paged.attend(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        sliding_window=sliding_window,
        scaling=scaling,
    )
    return output[None], None


AttentionInterface.register(ATTENTION_NAME, _attend)

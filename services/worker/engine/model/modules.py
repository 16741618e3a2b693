"""The layers of a decoder-only model as torch modules, without weights.

Llama, Mistral, Qwen2 and Qwen3 share these modules. Parameters have the names of checkpoints; their
order is their order in memory. Every operation rounds as in `transformers`, so that both yield the
same tokens in float64; tests compare each architecture.
"""

from typing import Any

import torch
from torch import nn

from services.worker.engine.model.activations import ACTIVATIONS
from services.worker.engine.model.config import ModelConfig


class EagerRmsNorm(nn.Module):
    """RMSNorm that computes in float32 for any dtype of activations."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.variance_epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., size] → the same shape and dtype."""
        # As in `transformers`: norm in float32, round, then scale by the weight.
        exact = hidden.float()
        scale = torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * (exact * scale).to(hidden.dtype)


class LayerAttention(nn.Module):
    """Projections, head norms and rotation of attention; `paged` computes the attention itself."""

    def __init__(self, config: ModelConfig, sliding_window: int | None) -> None:
        super().__init__()
        hidden, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_attention_heads * size, config.num_key_value_heads * size
        self.q_proj = nn.Linear(hidden, heads, bias=config.biases.qkv)
        self.k_proj = nn.Linear(hidden, kv_heads, bias=config.biases.qkv)
        self.v_proj = nn.Linear(hidden, kv_heads, bias=config.biases.qkv)
        self.o_proj = nn.Linear(heads, hidden, bias=config.biases.output)
        self.q_norm: nn.Module = nn.Identity()
        self.k_norm: nn.Module = nn.Identity()
        if config.head_norms:
            self.q_norm = EagerRmsNorm(size, config.rms_norm_eps)
            self.k_norm = EagerRmsNorm(size, config.rms_norm_eps)
        self._head_dim = size
        self._sliding_window = sliding_window

    def forward(
        self, hidden: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], paged: Any
    ) -> torch.Tensor:
        """[1, tokens, hidden] → the same shape; `paged.attend` as `PagedAttention.forward`."""
        rows = hidden[0]
        query, key, value = (
            projected(rows).view(len(rows), -1, self._head_dim)
            for projected in (self.q_proj, self.k_proj, self.v_proj)
        )
        cosine, sine = (angles[0][:, None] for angles in rotation)
        query, key = self.q_norm(query), self.k_norm(key)
        attended = paged.attend(
            query * cosine + _rotate_half(query) * sine,
            key * cosine + _rotate_half(key) * sine,
            value,
            sliding_window=self._sliding_window,
            scaling=self._head_dim**-0.5,
        )
        output: torch.Tensor = self.o_proj(attended.reshape(len(rows), -1))
        return output[None]


def _rotate_half(heads: torch.Tensor) -> torch.Tensor:
    """Swap the halves of [..., head_dim] and negate the new first half."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class Mlp(nn.Module):
    """The gated MLP: down(activation(gate(x)) · up(x))."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, gated, bias = config.hidden_size, config.intermediate_size, config.biases.mlp
        self.gate_proj = nn.Linear(hidden, gated, bias=bias)
        self.up_proj = nn.Linear(hidden, gated, bias=bias)
        self.down_proj = nn.Linear(gated, hidden, bias=bias)
        self._activation = ACTIVATIONS[config.hidden_act]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden] → the same shape."""
        gated = self._activation(self.gate_proj(hidden)) * self.up_proj(hidden)
        output: torch.Tensor = self.down_proj(gated)
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a pre-norm and a residual connection."""

    def __init__(self, config: ModelConfig, sliding_window: int | None) -> None:
        super().__init__()
        self.self_attn = LayerAttention(config, sliding_window)
        self.mlp = Mlp(config)
        self.input_layernorm = EagerRmsNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = EagerRmsNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        paged: Any,
    ) -> torch.Tensor:
        """[1, tokens, hidden] → the same shape; cosine and sine are [1, tokens, head_dim]."""
        # Add twice instead of all terms at once, because the rounding must match `transformers`.
        normed = self.input_layernorm(hidden_states)
        hidden = hidden_states + self.self_attn(normed, position_embeddings, paged)
        output: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return output


class Embedding(nn.Module):
    """The token embedding, [rows, size]."""

    # `torch.nn.Embedding` would initialize its rows, and load torch's compiler to do so.
    def __init__(self, rows: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, size))


class _Body(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, window) for window in config.sliding_windows
        )
        self.norm = EagerRmsNorm(config.hidden_size, config.rms_norm_eps)


class Skeleton(nn.Module):
    """The model on torch's meta device: parameters have names and shapes, and no memory."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # The decoder replaces the parameters later by views of the engine's memory.
        with torch.device("meta"):
            self.model = _Body(config)
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.eval()

"""The load of a comparison between engines, its model, and the figures of its streams.

Standard library only: this also runs in the environment of vLLM. All requests are sent at once,
with random prompts of equal length, and run to the same length, so that every iteration after the
prompts is a decode of all.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

QWEN_7B: Mapping[str, Any] = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 152064,
}
"""The layers of Qwen2.5-7B, without biases."""
TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
COMMON: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "seed": 1},
    # The generation_config.json of Qwen2.5-7B-Instruct.
    "qwen_default": {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.05,
        "seed": 1,
    },
}
"""Parameters with the names that they have in both engines."""
CASES = (
    *((1, "greedy"), (1, "qwen_default")),
    *((64, "greedy"), (64, "top_p"), (64, "qwen_default")),
    *((256, "greedy"), (256, "qwen_default")),
)
"""Number of requests and sampling."""
CASE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class LoopLoad:
    """A model, the memory of its engine, and the lengths of requests in tokens."""

    config: Mapping[str, Any]
    memory_bytes: int
    prompt_tokens: int
    output_tokens: int
    counts: tuple[int, ...]

    @property
    def cases(self) -> list[tuple[int, str]]:
        """The cases with these numbers of requests."""
        return [case for case in CASES if case[0] in self.counts]

    def prompts(self, count: int, seed: int) -> list[tuple[int, ...]]:
        """Random prompts, without a common prefix."""
        rng, vocabulary = Random(seed), self.config["vocab_size"]
        return [
            tuple(rng.randrange(vocabulary) for _ in range(self.prompt_tokens))
            for _ in range(count)
        ]

    def write_model(self, folder: Path) -> Path:
        """Write the configuration of the model, which has no weights; returns its folder."""
        model_dir = folder / "model"
        model_dir.mkdir()
        (model_dir / "config.json").write_text(json.dumps({**COMMON, **self.config}))
        return model_dir


FULL = LoopLoad(QWEN_7B, 60 << 30, 500, 120, (1, 64, 256))
DRY = LoopLoad(TINY, 100 << 20, 20, 16, (1,))


def figures_of(streams_s: Iterable[Sequence[float]], began_s: float) -> dict[str, float]:
    """Figures of a case from the arrival of each stream's tokens.

    `interval`: between two tokens of a request while all requests run.
    """
    streams_s = list(streams_s)
    all_run_s = max(times_s[0] for times_s in streams_s)
    first_end_s = min(times_s[-1] for times_s in streams_s)
    ended_s = max(times_s[-1] for times_s in streams_s)
    intervals_s = sorted(
        later - earlier
        for times_s in streams_s
        for earlier, later in pairwise(times_s)
        if all_run_s <= earlier and later <= first_end_s
    )
    return {
        "interval_p50_ms": 1e3 * quantile(intervals_s, 0.5),
        "interval_p99_ms": 1e3 * quantile(intervals_s, 0.99),
        "first_tokens_s": all_run_s - began_s,
        "took_in_all_s": ended_s - began_s,
        "output_tokens_per_s": sum(map(len, streams_s)) / (ended_s - began_s),
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted values; NaN without values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")

"""The model of paced clusters and demos: a synthetic configuration with the default tokenizer.

Its weights are random. It is small enough for two CPU cores to compute an iteration well within the
time that pacing pads it to; its layers are wide enough to fill most of a worker's memory, as those
of a large model do.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

VOCABULARY = 2048
"""Size of the vocabulary; synthetic token ids stay below it."""
NUM_LAYERS = 4
DEEP: Mapping[str, Any] = {
    "num_hidden_layers": 16,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
"""Changes to CONFIG for a picture with more layers and more KV cache per token."""
CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 192,
    "intermediate_size": 768,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
# Options of a cluster that serves this model. The chunks are small because the memory is.
LARGE_KV: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "intermediate_size": 1792,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
"""A layer for each of four workers, and a large KV per token: few requests fill the KV cache."""
TINY_OPTIONS = {"load_format": "dummy", "chunk_size": "64KiB"}
TINY_ON_GPU = {"load_format": "dummy"}
"""Without `chunk_size`: CUDA maps memory in chunks of at least 2 MiB."""
COPIED = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def write_tiny_model(
    folder: Path, tokenizer_dir: Path, changes: Mapping[str, Any] | None = None
) -> Path:
    """Create `folder` and write the model into it; returns `folder`. Raises OSError.

    `changes` override keys of CONFIG.
    """
    folder.mkdir(parents=True)
    config = dict(CONFIG) | dict(changes or {})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    for name in COPIED:
        source = tokenizer_dir / name
        if source.is_file():
            shutil.copyfile(source, folder / name)
    return folder

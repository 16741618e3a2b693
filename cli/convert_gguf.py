"""Turn a GGUF file into a folder of bf16 safetensors, in a process of its own.

A process of its own, because torch and the float32 copy of the weights must not stay in the one
that starts the cluster: `python -m cli.convert_gguf MODEL.gguf FOLDER PARENT_PID`.
"""

import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def end_with_parent(parent_pid: int) -> None:
    """Ask the kernel to kill this process with its parent, so that no orphan keeps converting."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        raise SystemExit("the process that asked for the conversion has ended")


def split_digits(tokenizer: Any) -> None:
    """Put back SmolLM's splitting of numbers into digits, which a GGUF file only names.

    Without it two spaces before a number become two tokens, where the model was trained on one.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, tokenizer, chat template and weights into `target`.

    The file is read several times over, which takes most of the half minute.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    folder, name = str(source.parent), source.name
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    # What is saved is an ordinary bf16 model: nothing in it may ask for GGUF when it is loaded.
    model.hf_quantizer = None
    for leftover in ("quantization_config", "_model_name_or_path"):
        model.config.__dict__.pop(leftover, None)
    ends = {f"{kind}_token_id": getattr(model.config, f"{kind}_token_id") for kind in _ENDS}
    model.generation_config = GenerationConfig(**ends)
    split_digits(tokenizer)
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


_ENDS = ("bos", "eos", "pad")


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

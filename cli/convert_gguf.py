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


def convert(source: Path, target: Path) -> None:
    """Write config, generation config, tokenizer, chat template and weights into `target`."""
    import torch  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GgufConfig,
    )

    folder, name = str(source.parent), source.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    print(model.config); print(model.generation_config); print(tokenizer); print(tokenizer.chat_template)
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))

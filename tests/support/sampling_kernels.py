"""Compiles the sampling kernels for a GPU, which need not be present, and reports their spills.

    python -m tests.support.sampling_kernels CAPABILITY

Prints a line per kernel: its name, registers, and bytes of the stack and of spills to local memory.
`TRITON_INTERPRET` must not be set.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from services.worker.engine.model.gpu_kernels import logit_rules, token_draw, token_scores
from services.worker.engine.sampling.device_sampler import GPU_SIZES, MASKED, WARPS

KERNELS = (
    logit_rules.penalize,
    logit_rules.adjust,
    *(token_draw.peaks, token_draw.threshold, token_draw.weigh, token_draw.widen),
    token_draw.choose,
    token_scores.score,
)
POINTERS = {
    "*bf16": ("logits",),
    "*fp32": ("scores", "lane_peaks", "span_peaks", "row_peaks", "thresholds", "logprobs"),
    "*i16": ("counts",),
    "*i32": ("span_best", "sizes", "window", "wide", "wide_sizes", "masks", "ids"),
    "*i64": ("columns", "span_masses", "window_masses", "tokens", "entries"),
}
CONSTANTS = {
    "SPAN": GPU_SIZES.span,
    "LANE": GPU_SIZES.lane,
    "CHUNK": GPU_SIZES.chunk,
    # For 152,064 tokens, the vocabulary of Qwen2.5.
    "SPANS": 64,
    "LANES": 8192,
    "ID_BITS": 20,
    "LOWEST": MASKED,
}


def used(kernel: Any, capability: int) -> str:
    """ptxas's report on a kernel: registers, bytes of stack, bytes of spilled stores."""
    types = {name: kind for kind, names in POINTERS.items() for name in names}
    signature = {
        name: "constexpr" if name in CONSTANTS else types.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(
        kernel,
        signature=signature,
        constexprs={name: CONSTANTS[name] for name in kernel.arg_names if name in CONSTANTS},
        attrs={
            (place,): [["tt.divisibility", 16]]
            for place, name in enumerate(kernel.arg_names)
            if name in types
        },
    )
    options = {"num_warps": WARPS, "enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target (\w+)", ptx)
    assert target is not None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        ptxas = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        command = [ptxas, "-v", f"--gpu-name={target[1]}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", report)
    memory = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores", report)
    assert registers is not None and memory is not None, report
    return f"{registers[1]} registers {memory[1]} {memory[2]}"


if __name__ == "__main__":
    for each in KERNELS:
        print(each.__name__, used(each, int(sys.argv[1])))

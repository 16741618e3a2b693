"""An engine does not import libraries that take seconds to load."""

import subprocess
import sys
from pathlib import Path

from tests.support.tiny_models import make_tiny_model

HEAVY = ("transformers", "torch._dynamo", "sympy", "torch.distributed.tensor")
PROGRAM = f"""
import sys
from pathlib import Path
import torch
import services.worker.engine.process
from services.worker.engine.compute.runner import ModelRunner
from services.worker.engine.compute.runner_config import RunnerConfig

runner = ModelRunner.load(RunnerConfig(Path(sys.argv[1]), "cpu", torch.float64, 64 << 20))
assert runner.num_blocks
print(*[name for name in {HEAVY!r} if name in sys.modules])
"""


def test_a_start_imports_no_model_library_and_no_compiler(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr

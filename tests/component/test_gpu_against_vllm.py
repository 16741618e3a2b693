"""`scripts/gpu_against_vllm.py` with our real engine and a stand-in for vLLM."""

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

from benchmarks.gpu_steps.loop_load import DRY, figures_of
from tests.support.cluster import REPOSITORY

TIMEOUT_S = 280
STAND_IN = {
    "vllm/__init__.py": '__version__ = "stand-in"',
    "vllm/engine/arg_utils.py": """
        def AsyncEngineArgs(**arguments):
            assert arguments["load_format"] == "dummy" and arguments["skip_tokenizer_init"]
            return arguments
        """,
    "vllm/sampling_params.py": """
        class RequestOutputKind:
            DELTA = "delta"

        def SamplingParams(**arguments):
            assert arguments["ignore_eos"] and arguments["output_kind"] == "delta"
            return arguments
        """,
    "vllm/v1/engine/async_llm.py": """
        import asyncio
        from types import SimpleNamespace

        class AsyncLLM:
            @classmethod
            def from_engine_args(cls, arguments):
                return cls()

            async def generate(self, prompt, params, request_id):
                assert len(prompt["prompt_token_ids"]) == PROMPT_TOKENS
                for _ in range(params["max_tokens"]):
                    await asyncio.sleep(0.001)
                    yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7])])

            def shutdown(self):
                pass
        """,
}


def test_both_engines_serve_the_same_requests(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name, text in STAND_IN.items():
        path = site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text).replace("PROMPT_TOKENS", str(DRY.prompt_tokens)))
    command = [sys.executable, "scripts/gpu_against_vllm.py", str(tmp_path / "out"), "--dry"]
    done = subprocess.run(
        [*command, "--vllm-site", str(site)],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    steps = json.loads((tmp_path / "out" / "figures.json").read_text())["steps"]
    for case in ("1 greedy", "1 qwen_default"):
        for engine in ("tideserve", "vllm"):
            assert steps[engine]["figures"][case]["interval_p50_ms"] > 0
        (line,) = [line for line in done.stdout.splitlines() if line.startswith(case)]
        assert len(line.split()) == 5, "two times and their ratio"


def test_intervals_count_while_all_requests_run() -> None:
    figures = figures_of([[1.0, 1.5, 2.0, 2.1], [1.5, 2.0]], 0.5)
    assert figures["interval_p50_ms"] == 500
    assert (figures["first_tokens_s"], figures["took_in_all_s"]) == (1.0, 1.6)
    assert figures["output_tokens_per_s"] == 6 / 1.6

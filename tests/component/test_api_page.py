"""The examples of docs/api.md produce the documented results."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.gateway import TEXT, Case

PAGE = Path(__file__).parents[2] / "docs" / "api.md"
EXAMPLES = re.findall(r"```sh\n(curl .*?)\n```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
MODEL = "SmolLM2-135M-Instruct"


pytestmark = pytest.mark.gateway(model_aliases=MODEL)


async def run(case: Case, example: str) -> str:
    """The output of the command."""
    process = await asyncio.create_subprocess_exec(
        "sh",
        "-c",
        example,
        stdout=asyncio.subprocess.PIPE,
        env={"URL": case.url, "PATH": "/usr/bin:/bin"},
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


def text_of(answer: dict[str, Any]) -> str:
    """The text of a response of any API."""
    if "choices" in answer:
        return str(answer["choices"][0]["message"]["content"])
    content = answer["output"][0]["content"] if "output" in answer else answer["content"]
    return "".join(block["text"] for block in content)


async def test_examples(case: Case) -> None:
    assert len(EXAMPLES) == 6
    for example in EXAMPLES:
        written = await run(case, example)
        if "count_tokens" in example:
            assert json.loads(written)["input_tokens"] > len("What is the capital of France?")
        elif '"stream": true' in example:
            data = [
                line.removeprefix("data: ") for line in written.splitlines() if line[:5] == "data:"
            ]
            deltas = [json.loads(line).get("delta", {}) for line in data]
            texts = [d if isinstance(d, str) else d.get("text", "") for d in deltas]
            assert "".join(texts) == TEXT[:20]
        else:
            assert text_of(json.loads(written)) == TEXT[:20]

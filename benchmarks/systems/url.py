"""Any running OpenAI-compatible server."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.errors import BenchError
from benchmarks.systems.system import OUTPUT_METRIC, Counters, Say, read_metrics, served_model
from tideserve.cli.errors import SystemUnavailable


class Url:
    """A System given as `name=URL`; it must accept token ids as prompts on /v1/completions."""

    def __init__(self, name: str, url: str, api_key: str | None = None) -> None:
        self.name = name
        self.model = ""
        self.api_key = api_key
        self.urls: Sequence[str] = (url.rstrip("/").removesuffix("/v1"),)

    def start(self, say: Say) -> None:
        """See System. Raises BenchError if the server cannot be reached."""
        try:
            self.model = served_model(self.urls[0], self.api_key)
        except SystemUnavailable as error:
            raise BenchError(f"{self.name}: {error}; start it, or correct the URL") from error
        say(f"{self.name}: {self.urls[0]} serves {self.model}")

    def stop(self) -> None:
        """Do nothing; the server is not ours."""

    def rest(self) -> bool:
        """Always False; the server is not ours."""
        return True

    def wake(self) -> None:
        """See System."""

    def counters(self) -> Counters:
        """See System. Reads vLLM's metric names, which other servers also use."""
        return vllm_counters(read_metrics(self.urls[0], self.api_key))

    def describe(self) -> Mapping[str, Any]:
        return {"kind": "url", "url": self.urls[0], "model": self.model}


def vllm_counters(metrics: Mapping[str, float]) -> Counters:
    """Counters of a server with vLLM's metrics."""
    preemptions = metrics.get("vllm:num_preemptions_total")
    prompts, output = metrics.get("vllm:prompt_tokens_total"), metrics.get(OUTPUT_METRIC)
    return Counters(
        preemptions=None if preemptions is None else int(preemptions),
        # vLLM counts a prompt once, at its first token.
        processed=None if prompts is None or output is None else prompts + output,
        output=output,
    )

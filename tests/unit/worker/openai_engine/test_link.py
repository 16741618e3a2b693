"""Conditions under which an upstream server counts as lost."""

from typing import cast

import pytest

from services.worker.openai_engine import link as module
from services.worker.openai_engine.client import UpstreamClient
from services.worker.openai_engine.errors import UpstreamLost
from services.worker.openai_engine.link import UpstreamLink
from services.worker.openai_engine.probe import UpstreamFacts
from services.worker.vllm_engine.running import EngineState, StepStats


async def test_a_streaming_server_that_misses_polls_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(module, "monotonic_s", lambda: now_s[0])
    client, state = UpstreamClient("http://h"), EngineState()

    async def probe() -> UpstreamFacts:
        raise UpstreamLost("unused")

    facts = cast(UpstreamFacts, None)
    link = UpstreamLink(client, facts, probe, StepStats(), state, silent_s=10, wait_s=10)
    silence = UpstreamLost("no answer in time", silent=True)
    now_s[0] = 9.0
    link.note_token()
    now_s[0] = 18.0
    link._note_failure(silence)
    assert not state.outage
    now_s[0] = 19.0
    link._note_failure(silence)
    assert state.outage
    await client.close()

"""Prompt hashes sent to the scheduler for lookups in the caches of groups."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from services.core.ask import NO_PREFIX
from services.core.prefix.block_hash import prompt_prefix, tenant_salt
from services.gateway.api.completion import parse_completion
from services.gateway.keys.principal import Principal
from services.gateway.model.served_model import load_model
from services.gateway.records.request_record import RequestRecord
from services.gateway.serving.choice_runner import ask_for
from services.gateway.serving.prepare import Preparer
from services.gateway.serving.prepared import PreparedChoice
from services.gateway.structure.checker import GrammarChecker
from services.gateway.text.tokenizer import TextPool
from tests.support.byte_tokenizer import write_model_folder

PROMPT = [3 + place % 200 for place in range(600)]


class Gateway:
    """Prepares completions; `block_size` is that of the scheduler, 0 for none."""

    def __init__(self, folder: Path) -> None:
        self.model = load_model("m", write_model_folder(folder))
        self.pool = TextPool(1)
        self.checker = GrammarChecker(self.model.vocab_size, self.model.tokenizer.added_tokens)
        self.block_size = 16
        self._preparer = Preparer(
            self.model, self.pool, lambda: 300_000, self.checker, lambda: self.block_size
        )

    async def choices(self, owner: str = "", **fields: Any) -> tuple[PreparedChoice, ...]:
        record = RequestRecord("r", 0.0, principal=Principal(owner), response_id="r")
        body = parse_completion({"model": "m", "max_tokens": 4, "prompt": PROMPT} | fields)
        return (await self._preparer.prepare(body, record)).choices


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    gateway = Gateway(tmp_path / "model")
    yield gateway
    gateway.pool.close()
    await gateway.checker.close()


async def test_an_ask_has_the_block_hashes_of_engines(gateway: Gateway) -> None:
    (choice,) = await gateway.choices("anna", cache_salt="x")
    salt = choice.request.cache_salt
    assert salt == tenant_salt("anna", "x")
    assert ask_for(choice).prefix == prompt_prefix(PROMPT, salt, 16)
    assert len(choice.prefix.hashes) == 600 // 128


async def test_each_prompt_has_its_own_hashes_shared_by_its_choices(gateway: Gateway) -> None:
    other = [9, *PROMPT]
    choices = await gateway.choices(prompt=[PROMPT, other], n=2)
    prefixes = [choice.prefix for choice in choices]
    assert prefixes[0] == prefixes[1] == prompt_prefix(PROMPT, "", 16)
    assert prefixes[2] == prefixes[3] == prompt_prefix(other, "", 16)


async def test_owners_and_salts_share_no_hash(gateway: Gateway) -> None:
    seen: set[int] = set()
    for owner, salt in (("", None), ("", "x"), ("anna", None), ("anna", "x"), ("ben", "x")):
        (choice,) = await gateway.choices(owner, cache_salt=salt)
        assert choice.prefix.hashes and seen.isdisjoint(choice.prefix.hashes)
        seen.update(choice.prefix.hashes)


@pytest.mark.parametrize(
    "fields", [{"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"echo": True}]
)
async def test_an_uncached_prompt_has_no_prefix(gateway: Gateway, fields: dict[str, Any]) -> None:
    (choice,) = await gateway.choices(**fields)
    asked = ask_for(choice).prefix != NO_PREFIX
    assert asked is (fields == {"echo": True})


async def test_no_prefixes_are_sent_unless_the_scheduler_wants_them(gateway: Gateway) -> None:
    gateway.block_size = 0
    (choice,) = await gateway.choices()
    assert ask_for(choice).prefix == NO_PREFIX

"""Builds and checks the grammar of a request's output."""

from collections.abc import Sequence
from dataclasses import replace

from services.core.request import Grammar
from services.gateway.api.chat import ChatRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.model.chat_model import ChatModel
from services.gateway.records.request_record import RequestRecord
from services.gateway.structure.checker import GrammarChecker
from services.gateway.structure.structured_outputs import Structure
from services.gateway.tools.format import Thinking


async def checked_grammar(
    body: GenerationRequest,
    chat: ChatModel | None,
    thinking: Thinking,
    checker: GrammarChecker,
    record: RequestRecord,
) -> Grammar | None:
    """The grammar of the whole output, including reasoning and tool calls; None if unconstrained.

    Writes warnings about parts that are not enforced to `record`.

    Raises:
        GatewayError: if the grammar is invalid or cannot be checked now.
    """
    answer = body.structure
    if answer is not None:
        (answer,) = await _checked([answer], checker, record)
    if not isinstance(body, ChatRequest) or chat is None:
        return None if answer is None else answer.grammar
    # Check the schemas on their own, so that errors and warnings name places in them.
    schemas = await _checked(chat.argument_schemas(body), checker, record)
    whole = chat.structure(body, answer, schemas, thinking)
    if whole is None or whole == answer:
        return None if whole is None else whole.grammar
    return (await checker.check(whole, record.limit_key)).grammar


async def _checked(
    structures: Sequence[Structure], checker: GrammarChecker, record: RequestRecord
) -> list[Structure]:
    """The structures as they will be enforced."""
    if not structures:
        return []
    checked = await checker.check_all(structures, record.limit_key)
    for grammar in checked:
        record.warnings += tuple(f"not enforced: {text}" for text in grammar.ignored)
    return [
        replace(structure, grammar=grammar.grammar)
        for structure, grammar in zip(structures, checked, strict=True)
    ]

"""Prepares chats for the template, and selects how their output is parsed and constrained."""

import json
from collections.abc import Container, Mapping, Sequence
from typing import Any

from services.common.errors import ConfigError
from services.gateway.api.chat import ChatRequest
from services.gateway.api.conversation import template_messages
from services.gateway.structure.schema import check_size
from services.gateway.structure.structured_outputs import Structure, lark_literal
from services.gateway.text.token_cuts import TokenCuts
from services.gateway.tools import mistral
from services.gateway.tools.argument_types import argument_types
from services.gateway.tools.call_grammar import call_rules
from services.gateway.tools.element_grammar import unenforced_keyword
from services.gateway.tools.format import (
    ELEMENT_FORMATS,
    ChatForm,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    opening_marker,
    reasoning_format,
    reasoning_markers,
    thinking,
    tool_format,
    tool_markers,
)
from services.gateway.tools.grammar_text import Rules, is_token
from services.gateway.tools.hermes import CLOSE, OPEN
from services.gateway.tools.output_grammar import (
    answer_rules,
    arguments_schema,
    harmony_grammar,
    output_grammar,
    text_before,
)
from services.gateway.tools.tool import CallMode, Tool
from services.gateway.vocabulary.errors import BadRequest, NotSupported

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one, \
with a JSON schema of its arguments:
<tools>
{tools}
</tools>

To call a function, write a JSON object with its name and arguments between {open} and {close}, \
and nothing else:
{open}
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
{close}"""


def describe_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """Describe the tools in the system message, which is added if there is none."""
    described = [dict(message) for message in messages]
    if not tools:
        return described
    lines = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, open=OPEN, close=CLOSE)
    if described and described[0]["role"] == "system":
        described[0]["content"] = f"{described[0]['content']}\n\n{text}"
        return described
    return [{"role": "system", "content": text}, *described]


def flatten_tool_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write tool calls and tool responses as plain text; responses become messages of the user.

    For templates that support neither tools nor the role "tool".
    """
    flat: list[dict[str, Any]] = []
    after_response = False
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool":
            response = f"<tool_response>\n{content}\n</tool_response>"
            # Many templates require roles to alternate, so consecutive responses share a message.
            if after_response:
                flat[-1]["content"] += f"\n{response}"
            else:
                flat.append({"role": "user", "content": response})
        else:
            calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join([content, *calls] if content else calls)
            flat.append({"role": role, "content": text})
        after_response = role == "tool"
    return flat


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def with_text_arguments(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write the arguments of calls as JSON, for templates that concatenate them with text."""
    return [
        {**message, "tool_calls": [_text_call(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def with_thinking(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Name the reasoning of calls as gpt-oss's template does, which takes it or content only."""
    named: list[dict[str, Any]] = []
    for message in messages:
        fields = dict(message)
        thoughts = fields.pop("reasoning_content", None)
        if thoughts and "tool_calls" in fields and not fields["content"]:
            fields["thinking"] = thoughts
        named.append(fields)
    return named


def _text_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function, arguments = call["function"], call["function"]["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


PARAM = "tools"


class ChatModel:
    """The chat template of a model, and the formats of its tool calls and reasoning."""

    def __init__(
        self,
        source: str,
        variables: Container[str],
        added_tokens: Mapping[int, str],
        configured_tools: str,
        configured_reasoning: str,
        *,
        cuts: TokenCuts | None = None,
    ) -> None:
        """`source`: text of the chat template; `variables`: names of the variables it reads.

        `added_tokens`: tokens added to the vocabulary, special tokens among them, by id.
        `configured_tools`, `configured_reasoning`: names of formats, or "auto". `cuts`: if not
        None, cuts the tokens in messages of the roles user and tool.

        Raises:
            ConfigError: if only one of the formats is harmony.
        """
        ids = {text: token_id for token_id, text in added_tokens.items()}
        self._takes_tools = "tools" in variables
        self._ids = ids
        self.cuts = cuts
        self.tool_format: ToolFormat = tool_format(configured_tools, source, self._takes_tools, ids)
        self.reasoning_format: ReasoningFormat = reasoning_format(configured_reasoning, source, ids)
        harmony = (ToolFormat.HARMONY, ReasoningFormat.HARMONY)
        if (self.tool_format is harmony[0]) != (self.reasoning_format is harmony[1]):
            raise ConfigError(
                f"'tool_format' {self.tool_format} does not go with 'reasoning_format'"
                f" {self.reasoning_format}; set both to harmony, or neither"
            )

    def template_fields(self, body: ChatRequest) -> dict[str, Any]:
        """The arguments of `ChatTemplate.render` for the prompt of `body`.

        Raises:
            BadRequest: if the model does not support the tools, or the last message has tool calls
                and should be continued.
        """
        messages = template_messages(body.messages)
        if self.cuts is not None:
            messages = self.cuts.cut_messages(messages)
        tools = self._prompt_tools(body)
        # If the template ignores tools, describe them as text, in the format of Hermes.
        if not self._takes_tools:
            messages, tools = describe_tools(flatten_tool_messages(messages), tools), ()
        if self.tool_format is ToolFormat.DEEPSEEK_V3:
            messages = with_text_arguments(messages)
        elif self.tool_format is ToolFormat.HARMONY:
            messages = with_thinking(messages)
        if body.continue_final_message and "tool_calls" in messages[-1]:
            raise BadRequest(
                "a message with tool calls cannot be continued; append the results of the calls, or"
                " send 'continue_final_message': false",
                param="continue_final_message",
            )
        return {
            "messages": messages,
            "tools": [tool.described() for tool in tools],
            "variables": body.template_variables,
            "add_generation_prompt": body.add_generation_prompt is not False,
            "continue_final_message": bool(body.continue_final_message),
        }

    def thinking(self, prompt: str) -> Thinking:
        """Return where the output after `prompt` begins: inside, before or after reasoning."""
        return thinking(self.reasoning_format, prompt)

    def form(self, body: ChatRequest, thinking: Thinking) -> ChatForm | None:
        """Select how an answer to `body` is parsed; None if all of it is content."""
        tools = body.callable_tools
        parts = self.reasoning_format is not ReasoningFormat.NONE
        if not tools and not parts:
            return None
        markers = [*reasoning_markers(self.reasoning_format)]
        markers += tool_markers(self.tool_format) if tools else ()
        return ChatForm(
            tool_format=self.tool_format,
            names=frozenset(tool.name for tool in tools),
            types={tool.name: argument_types(tool.parameters) for tool in tools}
            if self.tool_format in ELEMENT_FORMATS
            else {},
            thinking=thinking if parts else None,
            markers=frozenset(self._ids[marker] for marker in markers if marker in self._ids),
            include_reasoning=body.include_reasoning is not False,
            marks=self.reasoning_format.marks,
        )

    def argument_schemas(self, body: ChatRequest) -> list[Structure]:
        """The schemas of the arguments of all tools whose calls are constrained, to be checked.

        Raises:
            BadRequest: if a schema, or all together, exceed a limit.
        """
        if not self._constrains_calls(body):
            return []
        if self.tool_format in ELEMENT_FORMATS:
            _check_elements(body.callable_tools)
        schemas = list(map(arguments_schema, body.callable_tools))
        check_size("".join(schema.grammar.text for schema in schemas), PARAM)
        return schemas

    def structure(
        self,
        body: ChatRequest,
        answer: Structure | None,
        arguments: Sequence[Structure],
        thinking: Thinking,
    ) -> Structure | None:
        """Build the grammar of the whole output; None if the output is unconstrained.

        `answer`: the grammar of the part after reasoning. `arguments`: the checked
        `argument_schemas`.

        Raises:
            BadRequest: if the grammar is too long.
        """
        if not arguments:
            if answer is None or thinking is Thinking.OVER:
                return answer
            return self._grammar(answer.param, answer_rules(answer.grammar), None, thinking)
        calls = self._calls(body, arguments)
        if body.call_mode is CallMode.REQUIRED:
            return self._grammar(PARAM, None, calls, thinking)
        if answer is not None:
            return self._grammar(answer.param, answer_rules(answer.grammar), calls, thinking)
        return self._grammar(PARAM, text_before(calls), None, thinking)

    def _grammar(
        self, param: str, answer: Rules | None, calls: Rules | None, thinking: Thinking
    ) -> Structure:
        """Grammar of an output that is `answer` or `calls`, after reasoning."""
        if self.tool_format is ToolFormat.HARMONY:
            return harmony_grammar(param, answer, calls, thinking, self.spell_marker)
        alternatives = [part for part in (answer, calls) if part is not None]
        marks = self.reasoning_format.marks
        return output_grammar(param, alternatives, thinking, self.spell_marker, marks)

    def spell_marker(self, text: str) -> str:
        """Spell a marker in a grammar: as the model's token for it, else as a literal."""
        token_id = self._ids.get(text)
        return lark_literal(text) if token_id is None else f"<[{token_id}]>"

    def _prompt_tools(self, body: ChatRequest) -> Sequence[Tool]:
        """Tools that the prompt describes."""
        if body.call_mode is CallMode.NONE:
            return ()
        if self.tool_format is ToolFormat.NONE:
            raise NotSupported(
                "the format of tool calls in the model's chat template is unknown; leave 'tools'"
                " out, or set 'tool_format' of the gateway",
                param=PARAM,
            )
        return body.tools

    def _constrains_calls(self, body: ChatRequest) -> bool:
        if body.call_mode is not CallMode.AUTO:
            return body.call_mode is CallMode.REQUIRED
        if body.structure is not None:
            return True
        # With tool choice "auto" the model may write any text before a call, so strict schemas can
        # be enforced only if a special token begins the call.
        return any(tool.strict for tool in body.callable_tools) and self._calls_begin_with_token()

    def _calls(self, body: ChatRequest, arguments: Sequence[Structure]) -> Rules:
        names = (tool.name for tool in body.callable_tools)
        texts = (schema.grammar.text for schema in arguments)
        return call_rules(
            self.tool_format,
            dict(zip(names, texts, strict=True)),
            parallel=body.several_calls,
            spell=self.spell_marker,
            named=mistral.ARGUMENTS in self._ids,
        )

    def _calls_begin_with_token(self) -> bool:
        opening = opening_marker(self.tool_format)
        return opening is not None and is_token(self.spell_marker(opening))


def _check_elements(tools: Sequence[Tool]) -> None:
    """Raise BadRequest if a strict schema has keywords that elements cannot enforce."""
    for tool in tools:
        if tool.strict and (place := unenforced_keyword(tool)) is not None:
            raise BadRequest(
                f'{place} of the strict tool "{tool.name}" cannot be enforced in the model\'s'
                " format of tool calls; omit it, or send 'strict': false",
                param=PARAM,
            )

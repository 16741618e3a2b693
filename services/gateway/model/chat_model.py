"""The form of chats with a model: its template, and the formats of calls and reasoning."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.gateway.api.chat import ChatRequest
from services.gateway.api.conversation import template_messages
from services.gateway.model.template import ChatTemplate
from services.gateway.structure.asked import Structure, quoted
from services.gateway.tools import mistral
from services.gateway.tools.format import (
    ChatForm,
    ReasoningFormat,
    Thinking,
    ToolFormat,
    opening_mark,
    reasoning_format,
    reasoning_marks,
    thinking,
    tool_format,
    tool_marks,
)
from services.gateway.tools.hermes import CLOSE, OPEN
from services.gateway.tools.output_grammar import (
    Rules,
    answer_rules,
    call_rules,
    is_token,
    output_grammar,
    text_before,
)
from services.gateway.tools.tool import CallMode, Tool
from services.gateway.vocabulary.errors import NotSupported

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


def with_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]
) -> list[dict[str, Any]]:
    """The messages with the tools in the first one, which becomes the system's."""
    told = [dict(message) for message in messages]
    if not tools:
        return told
    lines = "\n".join(json.dumps(tool.described(), ensure_ascii=False) for tool in tools)
    text = _INTRODUCTION.format(tools=lines, open=OPEN, close=CLOSE)
    if told and told[0]["role"] == "system":
        told[0]["content"] = f"{told[0]['content']}\n\n{text}"
        return told
    return [{"role": "system", "content": text}, *told]


def flattened(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with calls and their answers as text; answers come from the user.

    Answers that follow each other are one message, as roles alternate in many templates.
    """
    told: list[dict[str, Any]] = []
    after_answer = False
    for message in messages:
        content, role = message["content"], message["role"]
        if role == "tool":
            answer = f"<tool_response>\n{content}\n</tool_response>"
            if after_answer:
                told[-1]["content"] += f"\n{answer}"
            else:
                told.append({"role": "user", "content": answer})
        else:
            calls = [_call(call["function"]) for call in message.get("tool_calls", ())]
            text = "\n".join([content, *calls] if content else calls)
            told.append({"role": role, "content": text})
        after_answer = role == "tool"
    return told


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


PARAM = "tools"


class ChatModel:
    """Writes prompts for a model and tells how its answers are read."""

    def __init__(
        self,
        template: ChatTemplate,
        added_tokens: Mapping[int, str],
        configured_tools: str,
        configured_reasoning: str,
    ) -> None:
        """`added_tokens`: those added to the vocabulary, special ones among them.

        `configured_tools`, `configured_reasoning`: formats, or "auto".
        """
        ids = {text: token_id for token_id, text in added_tokens.items()}
        takes_tools = template.takes("tools")
        self._template = template
        self._takes_tools = takes_tools
        self._ids = ids
        self.tool_format: ToolFormat = tool_format(
            configured_tools, template.source, takes_tools, ids
        )
        self.reasoning_format: ReasoningFormat = reasoning_format(
            configured_reasoning, template.source, ids
        )

    def prompt(self, body: ChatRequest) -> str:
        """The text of the prompt; raises BadRequest if the template refuses it."""
        messages = template_messages(body.messages)
        tools = self._told_tools(body)
        if not self._takes_tools:
            messages, tools = with_tools(flattened(messages), tools), ()
        return self._template.render(
            messages,
            tools=[tool.described() for tool in tools],
            variables=body.template_variables,
            add_generation_prompt=body.add_generation_prompt is not False,
            continue_final_message=bool(body.continue_final_message),
        )

    def thinking(self, prompt: str) -> Thinking:
        """Where the output after `prompt` begins."""
        return thinking(self.reasoning_format, prompt)

    def form(self, body: ChatRequest, where: Thinking) -> ChatForm | None:
        """How an answer to `body` is read; None if all of it is content."""
        tools = body.callable_tools
        parts = self.reasoning_format is not ReasoningFormat.NONE
        if not tools and not parts:
            return None
        marks = [*reasoning_marks(self.reasoning_format)]
        marks += tool_marks(self.tool_format) if tools else ()
        return ChatForm(
            tool_format=self.tool_format,
            names=frozenset(tool.name for tool in tools),
            thinking=where if parts else None,
            marks=frozenset(self._ids[mark] for mark in marks if mark in self._ids),
            include_reasoning=body.include_reasoning is not False,
        )

    def structure(
        self, body: ChatRequest, answer: Structure | None, where: Thinking
    ) -> Structure | None:
        """The required form of the whole output, if `answer` is that of the answer.

        Raises:
            BadRequest: if the tools make no grammar.
        """
        mode = body.call_mode
        if mode is CallMode.NONE:
            if answer is None or where is Thinking.OVER:
                return answer
            return output_grammar(answer.param, [answer_rules(answer.grammar)], where, self.mark)
        if mode is CallMode.REQUIRED:
            return output_grammar(PARAM, [self._calls(body)], where, self.mark)
        if answer is not None:
            either = [answer_rules(answer.grammar), self._calls(body)]
            return output_grammar(answer.param, either, where, self.mark)
        if any(tool.strict for tool in body.callable_tools) and self._calls_begin_with_token():
            return output_grammar(PARAM, [text_before(self._calls(body))], where, self.mark)
        return None

    def mark(self, text: str) -> str:
        """A mark as a grammar names it: by the token that the model has for it, or spelt."""
        token_id = self._ids.get(text)
        return quoted(text) if token_id is None else f"<[{token_id}]>"

    def _told_tools(self, body: ChatRequest) -> Sequence[Tool]:
        if body.call_mode is CallMode.NONE:
            return ()
        if self.tool_format is ToolFormat.NONE:
            raise NotSupported(
                "the model's chat template has no form of tool calls that is known here; leave"
                " 'tools' out, or set 'tool_format' of the gateway",
                param=PARAM,
            )
        return body.tools

    def _calls(self, body: ChatRequest) -> Rules:
        return call_rules(
            self.tool_format,
            body.callable_tools,
            parallel=body.several_calls,
            mark=self.mark,
            named=mistral.ARGUMENTS in self._ids,
        )

    def _calls_begin_with_token(self) -> bool:
        opening = opening_mark(self.tool_format)
        return opening is not None and is_token(self.mark(opening))

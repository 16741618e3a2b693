"""Bodies of chats."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from services.gateway.api.conversation import (
    MESSAGES_MAX,
    Message,
    check_conversation,
    check_count,
    plain_message,
)
from services.gateway.api.fields import INT32_MAX, is_text, refusal
from services.gateway.api.generation import GenerationRequest, Top, validated_generation
from services.gateway.api.parameters import (
    CHAT,
    UNKNOWN_PARAMETER,
    Policy,
    UnknownFields,
    known_fields,
    shown,
)
from services.gateway.api.tools import Choice, Tools
from services.gateway.tools.tool import CallMode, Tool
from services.gateway.vocabulary.errors import BadRequest, GatewayError

TEXT_CHARS_MAX = 64

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]

VARIABLES: Mapping[str, type] = {
    "clear_thinking": bool,
    "date_string": str,
    "enable_thinking": bool,
    "preserve_thinking": bool,
    "reasoning_effort": str,
    "thinking": bool,
    "thinking_budget": int,
    "tools_in_user_message": bool,
}
"""Names in templates that clients may set, and the types of their values."""
_TYPE_NAMES = {bool: "true or false", int: "an integer", str: f"up to {TEXT_CHARS_MAX} characters"}
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _parse(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal("must be an object")
    for name, item in value.items():
        kind = VARIABLES.get(name)
        if kind is None:
            known = ", ".join(VARIABLES)
            raise refusal(f"may have {known}; '{shown(name)}' is none of them")
        fits = type(item) is kind and (kind is not str or _is_short(str(item)))
        if item is not None and not fits:
            raise refusal(f"must have {_TYPE_NAMES[kind]} as '{name}'")
    return {name: item for name, item in value.items() if item is not None}


def _is_short(value: str) -> bool:
    return is_text(value) and len(value) <= TEXT_CHARS_MAX


TemplateVariables = Annotated[
    Mapping[str, Any],
    PlainValidator(_parse),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {
                        name: {"type": _JSON_TYPES[kind]} for name, kind in VARIABLES.items()
                    },
                    "additionalProperties": False,
                },
                {"type": "null"},
            ]
        }
    ),
]


def template_variables(
    given: Mapping[str, Any], enable_thinking: bool | None, effort: str | None
) -> dict[str, Any]:
    """All that is told to the template; what is `given` by name holds.

    An effort of "none" is no thinking, by the names that models have for it.
    """
    told: dict[str, Any] = {}
    if effort is not None:
        told["reasoning_effort"] = effort
    if effort == "none":
        told |= {"enable_thinking": False, "thinking": False}
    if enable_thinking is not None:
        told |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
    return {**told, **given}


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ] = Field(
        description="Of the roles system, developer, user and assistant; text, or text parts,"
        " which are joined."
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="Most output tokens; left out: what the context allows."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(None, description="Of the raw logits, of each output token.")
    top_logprobs: Top | None = Field(
        None, description="So many of the most likely tokens beside each; needs logprobs."
    )
    add_generation_prompt: bool | None = Field(
        None, description="false leaves out what begins the assistant's answer."
    )
    continue_final_message: bool | None = Field(
        None,
        description="The output goes on with the last message; needs add_generation_prompt false.",
    )
    tools: Tools = Field((), description="Functions that the model may call; see agents.md.")
    tool_choice: Choice = Field(
        None, description="none, auto (the default), required, or the function to call."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: a forced call is a single one, as that of a named function is."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Told to the template; none: no thinking, where the template can."
    )
    enable_thinking: bool | None = Field(None, description="Told to the template.")
    include_reasoning: bool | None = Field(
        None, description="false: what is thought before the answer is not sent."
    )
    chat_template_kwargs: TemplateVariables = Field(
        {}, description=f"Told to the template: {', '.join(VARIABLES)}."
    )

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest(
                "'max_tokens' and 'max_completion_tokens' differ; send one of them",
                param="max_tokens",
            )
        if self.top_logprobs and not self.logprobs:
            raise BadRequest(
                "'top_logprobs' needs 'logprobs': true; send both", param="top_logprobs"
            )
        if self.continue_final_message and self.add_generation_prompt is not False:
            raise BadRequest(
                "'continue_final_message' needs 'add_generation_prompt': false; send both",
                param="continue_final_message",
            )
        check_conversation(self.messages)
        self._check_tool_choice()
        return self

    def _check_tool_choice(self) -> None:
        choice = self.tool_choice
        if choice is None or choice.mode is CallMode.NONE:
            return
        if not self.tools and choice.mode is CallMode.REQUIRED:
            raise BadRequest("'tool_choice' needs 'tools'; send some", param="tool_choice")
        absent = (choice.names or frozenset()) - {tool.name for tool in self.tools}
        if absent:
            raise BadRequest(
                f"'tool_choice' names '{min(absent)}', which is none of the 'tools'; send it, too",
                param="tool_choice",
            )

    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def output_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def call_mode(self) -> CallMode:
        """Whether tools are called."""
        if not self.tools:
            return CallMode.NONE
        return CallMode.AUTO if self.tool_choice is None else self.tool_choice.mode

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.call_mode is CallMode.NONE:
            return ()
        names = None if self.tool_choice is None else self.tool_choice.names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)

    @property
    def several_calls(self) -> bool:
        """Whether a grammar of calls takes more than one."""
        single = self.tool_choice is not None and self.tool_choice.single
        return self.parallel_tool_calls is not False and not single

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the template is told beside the messages."""
        return template_variables(
            self.chat_template_kwargs, self.enable_thinking, self.reasoning_effort
        )


def parse_chat(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> ChatRequest:
    """A chat request; unknown fields are refused, or noted in its warnings.

    Raises:
        BadRequest: if a field is wrong.
    """
    return chat_of(data, UnknownFields(refuse_unknown))


def chat_of(data: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
    """See `parse_chat`; `unknown` may have met some already."""
    fields = known_fields(data, ChatRequest.model_fields, CHAT, unknown)
    if isinstance(messages := fields.get("messages"), list):
        check_count(messages)
        fields["messages"] = [plain_message(message, unknown) for message in messages]
    return validated_generation(ChatRequest, fields, unknown)


_QUOTED_NAME = re.compile(r"'([a-z_]+)'")
_QUOTED_PLACE = re.compile(r"'([a-z_]+)(?:\.[^' ]*)?'")


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields of a dialect's body.

    `own` are those that it translates. `names` tells what it calls fields of the chat, and `absent`
    are fields of the chat that it has under no name: both are unknown by their names of the chat.
    """

    own: frozenset[str]
    policy: Policy
    names: Mapping[str, str]
    absent: frozenset[str]

    @property
    def passed_on(self) -> frozenset[str]:
        """Fields of the chat that the dialect has under the same name."""
        return frozenset(ChatRequest.model_fields) - self.names.keys() - self.absent - self.own

    def split(
        self, data: Mapping[str, Any], unknown: UnknownFields
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Its own fields, and those of the chat; without what asks for nothing.

        Raises:
            BadRequest: see `known_fields`.
        """
        known = known_fields(data, self.own | self.passed_on, self.policy, unknown)
        own = {name: value for name, value in known.items() if name in self.own}
        return own, {name: value for name, value in known.items() if name not in own}

    def chat(self, fields: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
        """The chat that a body stands for; errors are told by the names that the client used.

        Raises:
            BadRequest: if a field is wrong.
        """
        try:
            return chat_of(fields, unknown)
        except BadRequest as error:
            # Where inside of a field it is wrong is left out: the dialect has other places.
            message = _QUOTED_PLACE.sub(self._exchanged, error.message)
            param = error.param and self.names.get(error.param.partition(".")[0], error.param)
            raise type(error)(message, param=param, code=error.code) from None

    def renamed(self, error: GatewayError) -> tuple[str, str | None]:
        """Message and field of an error from the chat's checks, by the client's names."""
        if error.code == UNKNOWN_PARAMETER:
            # The name that the client used was the wrong one.
            return error.message, error.param
        message = _QUOTED_NAME.sub(self._exchanged, error.message)
        return message, error.param and self.names.get(error.param, error.param)

    def _exchanged(self, match: re.Match[str]) -> str:
        name = self.names.get(match[1])
        return match[0] if name is None else f"'{name}'"

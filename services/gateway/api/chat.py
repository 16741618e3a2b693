"""The body of /v1/chat/completions, and the conversion of other APIs' bodies to it."""

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
from services.gateway.api.field_names import FieldNames
from services.gateway.api.fields import INT32_MAX, is_text, refusal
from services.gateway.api.generation import GenerationRequest, Top, validated_generation
from services.gateway.api.parameters import (
    CHAT,
    Policy,
    UnknownFields,
    escaped_name,
    known_fields,
)
from services.gateway.api.tools import Choice, Tools
from services.gateway.tools.tool import CallMode, Tool
from services.gateway.vocabulary.errors import BadRequest

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
"""Template variables that clients may set, and their types."""
_TYPE_NAMES = {bool: "true or false", int: "an integer", str: f"up to {TEXT_CHARS_MAX} characters"}
_JSON_TYPES = {bool: "boolean", int: "integer", str: "string"}


def _parse(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise refusal("must be an object")
    for name, setting in value.items():
        kind = VARIABLES.get(name)
        if kind is None:
            known = ", ".join(VARIABLES)
            raise refusal(f"must not have '{escaped_name(name)}'; the variables are {known}")
        fits = type(setting) is kind and (kind is not str or _is_short(str(setting)))
        if setting is not None and not fits:
            raise refusal(f"must have {_TYPE_NAMES[kind]} as '{name}'")
    return {name: setting for name, setting in value.items() if setting is not None}


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
    """The template's variables; `given` (`chat_template_kwargs`) takes precedence."""
    variables: dict[str, Any] = {}
    if effort is not None:
        variables["reasoning_effort"] = effort
    # Templates use either name for the switch: set both.
    if effort == "none":
        variables |= {"enable_thinking": False, "thinking": False}
    if enable_thinking is not None:
        variables |= {"enable_thinking": enable_thinking, "thinking": enable_thinking}
    return {**variables, **given}


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    messages: Annotated[
        list[Message], Field(min_length=1, max_length=MESSAGES_MAX, fail_fast=True)
    ] = Field(
        description="Messages of the roles system, developer, user, assistant and tool; content is"
        " text, or text parts, which are joined."
    )
    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="Maximum output tokens. Default: what the context allows."
    )
    max_completion_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = Field(
        None, description="The newer name of max_tokens."
    )
    logprobs: bool | None = Field(
        None, description="Whether to return log probabilities of the output tokens (raw logits)."
    )
    top_logprobs: Top | None = Field(
        None, description="Number of most likely tokens per output token; needs logprobs."
    )
    add_generation_prompt: bool | None = Field(
        None, description="false omits the start of the assistant's message from the prompt."
    )
    continue_final_message: bool | None = Field(
        None,
        description="The output continues the last message; needs add_generation_prompt false.",
    )
    tools: Tools = Field((), description="Functions that the model may call; see agents.md.")
    tool_choice: Choice = Field(
        None, description="none, auto (the default), required, or the function to call."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="false: at most a single forced call, as with a named function."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None, description="Passed to the template. none: no thinking, if the template supports it."
    )
    enable_thinking: bool | None = Field(None, description="Passed to the template.")
    include_reasoning: bool | None = Field(None, description="false: the reasoning is not sent.")
    chat_template_kwargs: TemplateVariables = Field(
        {}, description=f"Passed to the template: {', '.join(VARIABLES)}."
    )

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        # Equal values are fine: some clients send both names.
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise BadRequest(
                "'max_tokens' and 'max_completion_tokens' differ; send only one",
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
            raise BadRequest("'tool_choice' needs 'tools'; send tools", param="tool_choice")
        # A name that is not in `tools` would forbid every call.
        absent = (choice.names or frozenset()) - {tool.name for tool in self.tools}
        if absent:
            raise BadRequest(
                f"'tool_choice' names \"{min(absent)}\", which is not in 'tools'; add it to"
                " 'tools'",
                param="tool_choice",
            )

    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_tokens is not None else self.max_completion_tokens

    @property
    def output_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None

    @property
    def call_mode(self) -> CallMode:
        """The effective mode of `tool_choice`."""
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
        """Whether the grammar permits several calls."""
        single = self.tool_choice is not None and self.tool_choice.single
        return self.parallel_tool_calls is not False and not single

    @property
    def template_variables(self) -> dict[str, Any]:
        """The template's variables besides the messages."""
        return template_variables(
            self.chat_template_kwargs, self.enable_thinking, self.reasoning_effort
        )


def parse_chat(data: Mapping[str, Any], *, refuse_unknown: bool = False) -> ChatRequest:
    """Parse a chat request; unknown fields are refused, or listed in its warnings.

    Raises:
        BadRequest: if a field is invalid.
    """
    return chat_of(data, UnknownFields(refuse_unknown))


def chat_of(data: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
    """Like `parse_chat`, but collects unknown fields in `unknown`."""
    fields = known_fields(data, ChatRequest.model_fields, CHAT, unknown)
    if isinstance(messages := fields.get("messages"), list):
        # Count first, so that the work per message is bounded.
        check_count(messages)
        fields["messages"] = [plain_message(message, unknown) for message in messages]
    return validated_generation(ChatRequest, fields, unknown)


_QUOTED_MESSAGE = re.compile(r"'messages\.[^' ]*'")


@dataclass(frozen=True, slots=True)
class BodyFields:
    """The fields of another API's body, which is converted to a chat.

    `own`: fields that the conversion translates. `names`: the API's names in errors. `absent`: chat
    fields that the API lacks. In a body of the API, chat fields with other names are unknown.
    """

    own: frozenset[str]
    policy: Policy
    names: FieldNames
    absent: frozenset[str]

    @property
    def passed_on(self) -> frozenset[str]:
        """Chat fields with the same name in the API."""
        renamed = self.names.names.keys()
        return frozenset(ChatRequest.model_fields) - renamed - self.absent - self.own

    def split(
        self, data: Mapping[str, Any], unknown: UnknownFields
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Split a body into the API's own fields and chat fields, without ignored fields.

        Raises:
            BadRequest: see `known_fields`.
        """
        known = known_fields(data, self.own | self.passed_on, self.policy, unknown)
        own = {name: value for name, value in known.items() if name in self.own}
        return own, {name: value for name, value in known.items() if name not in own}

    def chat(self, fields: Mapping[str, Any], unknown: UnknownFields) -> ChatRequest:
        """Parse the converted fields as a chat. Errors have the API's field names.

        Raises:
            BadRequest: if a field is invalid.
        """
        try:
            return chat_of(fields, unknown)
        except BadRequest as error:
            # Omit the position of a message: it differs in the API's body.
            error.message = _QUOTED_MESSAGE.sub("'messages'", error.message)
            if error.param is not None and error.param.startswith("messages."):
                error.param = "messages"
            error.message, error.param = self.names.translated(error)
            raise

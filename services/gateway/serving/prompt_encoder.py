"""Turns the prompts of request bodies into tokens."""

from functools import partial

from services.gateway.api.chat import ChatRequest
from services.gateway.api.completion import CompletionRequest
from services.gateway.api.generation import GenerationRequest
from services.gateway.api.prompts import Prompt
from services.gateway.model.renderer import PromptTooLong, render_request
from services.gateway.model.served_model import ServedModel
from services.gateway.records.request_record import RequestRecord
from services.gateway.text.tokenizer import INLINE_SIZE, TextPool, too_long
from services.gateway.vocabulary.errors import BadRequest


def prompt_sizes(body: GenerationRequest) -> list[int]:
    """The approximate size of each prompt of `body`, in characters or in token ids."""
    match body:
        case ChatRequest():
            size = sum(message.size for message in body.messages)
            # Descriptions and schemas of the tools become part of the prompt.
            return [size + INLINE_SIZE * len(body.tools)]
        case CompletionRequest():
            return list(map(len, body.prompt))
    raise TypeError(f"{type(body).__name__} has no prompt")


class PromptEncoder:
    """Renders chats and tokenizes prompts for a model."""

    def __init__(self, model: ServedModel, pool: TextPool) -> None:
        self._model = model
        self._pool = pool

    async def encode(
        self, body: GenerationRequest, tokens_max: int, record: RequestRecord
    ) -> list[tuple[int, ...]]:
        """Token ids of each prompt of `body`; long texts are tokenized in a thread.

        The chats of a client wait for their turn. Writes warnings to `record`.

        Raises:
            GatewayError: if a prompt is refused, or certainly has more than `tokens_max` tokens.
        """
        match body:
            case ChatRequest():
                return [await self._chat_ids(body, tokens_max, record)]
            case CompletionRequest():
                # Many small prompts take as long as a large prompt.
                size = sum(prompt_sizes(body))
                return [
                    await self._pool.run(partial(self._prompt_ids, body, prompt, tokens_max), size)
                    for prompt in body.prompt
                ]
        raise TypeError(f"{type(body).__name__} has no prompt")

    async def _chat_ids(
        self, body: ChatRequest, tokens_max: int, record: RequestRecord
    ) -> tuple[int, ...]:
        chat, renderer = self._model.chat, self._model.renderer
        if chat is None or renderer is None:
            raise BadRequest("the model has no chat template; use /v1/completions")
        tokenizer, param = self._model.tokenizer, "messages"
        bytes_max = tokenizer.bytes_max(tokens_max)
        if chat.cuts is not None:
            # A text has hardly more cuts than tokens.
            bytes_max += len(chat.cuts.mark) * (tokens_max + 1)
        (size,) = prompt_sizes(body)
        request = await self._pool.run(
            lambda: render_request(chat.template_fields(body), bytes_max), size
        )
        try:
            text = await renderer.render(request, record.limit_key, record.warn)
        except PromptTooLong as error:
            raise too_long(f"{error.size_bytes} bytes", tokens_max, param) from None
        # The template writes the special tokens itself.
        special = body.add_special_tokens is True
        encode = partial(tokenizer.encode, text, special, tokens_max, param, chat.cuts)
        return tuple(await self._pool.run(encode, len(text)))

    def _prompt_ids(
        self, body: CompletionRequest, prompt: Prompt, tokens_max: int
    ) -> tuple[int, ...]:
        if isinstance(prompt, str):
            special = body.add_special_tokens is not False
            return tuple(self._model.tokenizer.encode(prompt, special, tokens_max))
        if max(prompt) >= self._model.vocab_size:
            raise BadRequest(
                f"token ids must be below the vocabulary's size {self._model.vocab_size}",
                param="prompt",
            )
        return prompt

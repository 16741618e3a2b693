"""Routes of the admin port for LoRA adapters, with the bodies and answers of vLLM's."""

from typing import Annotated, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.responses import PlainTextResponse, Response

from services.common.timeouts import timeout
from services.core.adapter import NAME_CHARS_MAX, SOURCE_CHARS_MAX
from services.core.ids import NAME_LENGTH_MAX
from services.gateway.api.json_object import parse_object
from services.gateway.api.validation import Strict, validated
from services.gateway.records.request_record import record_of
from services.gateway.serving.adapter_loader import AdapterLoader
from services.gateway.vocabulary.errors import BodyTimeout, BodyTooLarge

BODY_BYTES_MAX = 2**16
BODY_TIMEOUT_S = 30.0

LoraName = Annotated[str, Field(min_length=1, max_length=NAME_CHARS_MAX)]


class LoadAdapter(Strict):
    """Body of /v1/load_lora_adapter; `base` is a name of the adapter's model."""

    lora_name: LoraName
    lora_path: Annotated[str, Field(min_length=1, max_length=SOURCE_CHARS_MAX)]
    load_inplace: bool = False
    base: Annotated[str, Field(max_length=NAME_LENGTH_MAX)] = ""


class UnloadAdapter(Strict):
    """Body of /v1/unload_lora_adapter; vLLM's `lora_int_id` has no effect, as there."""

    lora_name: LoraName
    lora_int_id: int | None = None


B = TypeVar("B", LoadAdapter, UnloadAdapter)


def adapter_routes(loader: AdapterLoader) -> APIRouter:
    """The routes that load and unload adapters."""
    routes = APIRouter()

    @routes.post("/v1/load_lora_adapter", response_class=PlainTextResponse)
    async def load(request: Request) -> Response:
        """Check the adapter in a folder and make it available by its name."""
        body = await _read(request, LoadAdapter)
        owner = record_of(request.scope).principal.owner
        text = await loader.load(
            body.lora_name, body.lora_path, body.base, body.load_inplace, owner
        )
        return PlainTextResponse(f"Success: {text}")

    @routes.post("/v1/unload_lora_adapter", response_class=PlainTextResponse)
    async def unload(request: Request) -> Response:
        """Take an adapter away; its running requests end normally."""
        body = await _read(request, UnloadAdapter)
        return PlainTextResponse(f"Success: {await loader.unload(body.lora_name)}")

    return routes


async def _read(request: Request, kind: type[B]) -> B:
    data = bytearray()
    try:
        async with timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                data += piece
                if len(data) > BODY_BYTES_MAX:
                    raise BodyTooLarge(f"the body exceeds {BODY_BYTES_MAX} bytes; shorten it")
    except TimeoutError:
        raise BodyTimeout(
            f"the body did not arrive within {BODY_TIMEOUT_S:g} s; send it again"
        ) from None
    return validated(kind, parse_object(data))

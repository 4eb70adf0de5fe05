"""The models plane: chat completions and the model list (M1.1), under /v1 and /api/v1."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING, Final

from aiohttp import web

from encoders.openai import model_entry
from planes.gateway import GATEWAY, RECORD
from planes.json_bodies import json_response
from planes.middleware import admit, expect_continue, read_body, wants_comments
from planes.models.schemas import parse
from planes.sinks import SseSink, send_whole
from relay.errors import ModelNotFound
from relay.exchange import CommentPolicy, Exchange

if TYPE_CHECKING:
    from relay.request import RelayRequest

OPENAI_BASE: Final = "/v1"
OPENROUTER_BASE: Final = "/api/v1"  # the drop-in base of OpenRouter: comments while waiting (M2.1)
_PARSED_HERE_MAX: Final = 256 * 1024
_SLUG_LOGGED_MAX: Final = 512


def add_routes(app: web.Application) -> None:
    """Mount the plane on both bases."""
    for base in (OPENAI_BASE, OPENROUTER_BASE):
        comments = base == OPENROUTER_BASE
        app.router.add_post(
            f"{base}/chat/completions",
            partial(chat_completions, comments=comments),
            expect_handler=expect_continue,
        )
        others = base == OPENAI_BASE
        for path, handler in (("", list_models), ("/{slug:.+}", get_model)):
            app.router.add_get(
                f"{base}/models{path}",
                partial(handler, others=others),
                expect_handler=expect_continue,
            )


async def chat_completions(request: web.Request, *, comments: bool) -> web.StreamResponse:
    """`POST …/chat/completions`.

    Args:
        comments: whether this is the base of OpenRouter: it sends comments while an upstream is
            slow (M2.1), and reasoning under OpenRouter's name (M2.6).
    """
    gateway = request.app[GATEWAY]
    with gateway.inflight.request():
        principal = admit(request)
        body = await read_body(request)
        record = request[RECORD]
        read = partial(
            parse,
            body,
            request_id=record.request_id,
            created=int(time.time()),
            reasoning_field="reasoning" if comments else "reasoning_content",
        )
        # Megabytes of JSON take seconds; the streams of others go on meanwhile.
        chat = read() if len(body) <= _PARSED_HERE_MAX else await asyncio.to_thread(read)
        record.model, record.stream = chat.slug[:_SLUG_LOGGED_MAX], chat.stream
        candidates = gateway.router.resolve(chat.slug)
        slot = gateway.slots.hold(principal.org, chat.request_id, principal.max_concurrent)
        exchange = Exchange(
            chat,
            candidates,
            record,
            gateway.inflight,
            gateway.dialler,
            slot,
            gateway.billing,
            trial=principal.trial,
            observer=gateway.telemetry,
        )
        if chat.stream:
            wanted = comments and wants_comments(request, principal)
            return await _stream(request, exchange, chat, CommentPolicy() if wanted else None)
        return await _whole(request, exchange)


async def _stream(
    request: web.Request, exchange: Exchange, chat: RelayRequest, comments: CommentPolicy | None
) -> web.StreamResponse:
    stall_s = request.app[GATEWAY].settings.server.write_stall_s
    sink = SseSink(request, chat.request_id, write_stall_s=stall_s)
    await exchange.stream(sink, comments)
    return sink.response


async def _whole(request: web.Request, exchange: Exchange) -> web.StreamResponse:
    response = web.Response(content_type="application/json")
    response.headers["x-request-id"] = request[RECORD].request_id
    stall_s = request.app[GATEWAY].settings.server.write_stall_s

    async def respond(body: bytes) -> None:
        response.body = body
        await send_whole(request, response, write_stall_s=stall_s)

    await exchange.whole(respond)
    return response


async def list_models(request: web.Request, *, others: bool) -> web.Response:
    """`GET …/models`: the slugs that can be served.

    Args:
        others: whether the models of other planes are listed too (D6.3).
    """
    admit(request)
    gateway = request.app[GATEWAY]
    data = [
        model_entry(slug, owner=owner, created=gateway.started)
        for slug, owner in gateway.router.slugs()
    ]
    more = gateway.other_models if others else ()
    return json_response({"object": "list", "data": [*data, *more]})


async def get_model(request: web.Request, *, others: bool) -> web.Response:
    """`GET …/models/{slug}`; see `list_models`."""
    admit(request)
    gateway = request.app[GATEWAY]
    slug = request.match_info["slug"]
    for known, owner in gateway.router.slugs():
        if known == slug:
            return json_response(model_entry(slug, owner=owner, created=gateway.started))
    for other in gateway.other_models if others else ():
        if other["id"] == slug:
            return json_response({**other})
    raise ModelNotFound(f"the model {slug!r} is not listed here", param="model")

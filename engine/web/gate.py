"""What stands before every request, the page's and the routes' alike: who asks, whether they may, how much they send.

One ASGI layer around the whole server, so that no route can be forgotten.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.guardrail import HIDDEN
from engine.web.hosting import Hosting

log = logging.getLogger(__name__)

# Checked by machines that hold no password; they tell nothing about anybody.
OPEN = ("/healthz", "/readyz")
UPLOAD = "/gradio_api/upload"
# A form with two long prompts and what the page shows; a picture in an MCP call.
LARGEST_CALL = 4 * 2**20
GIB = 2**30
# Of Gradio's own routes: they fetch addresses for a visitor, take recordings apart, serve those who write pages.
CLOSED = (
    "/gradio_api/proxy=",
    "/gradio_api/process_recording",
    "/gradio_api/vibe",
    "/gradio_api/dev",
    "/monitoring",
    "/openapi.json",
)


class TooLargeError(Exception):
    """More came than was announced or is taken."""


class Gate:
    """app: the server behind it; uploads: the folder of Gradio's uploads; largest: bytes of one upload request."""

    def __init__(self, app: ASGIApp, hosting: Hosting, uploads: Callable[[], Path], largest: int) -> None:
        self.app, self.hosting, self.uploads, self.largest = app, hosting, uploads, largest
        self._token = ":".join(hosting.login).encode() if hosting.login else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            # Nothing here speaks over web sockets.
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = Headers(scope=scope)
        scope = {**scope, "client": (self._address(scope, headers), 0)}
        refusal = self._refusal(scope["path"], headers)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._pass_on(scope, receive, send)

    def _address(self, scope: Scope, headers: Headers) -> str:
        """Whose request it is. Each proxy appends the address that it saw, so the one that counts stands as many places
        from the end as there are proxies; what a visitor wrote in himself stands before it."""
        peer, proxies = (scope.get("client") or ("unknown", 0))[0], self.hosting.trusted_proxies
        if not proxies:
            return peer
        hops = [part.strip() for value in headers.getlist("x-forwarded-for") for part in value.split(",")]
        return hops[-proxies] if len(hops) >= proxies else peer

    def _refusal(self, path: str, headers: Headers) -> PlainTextResponse | None:
        if path not in OPEN and not self._allowed(headers.get("authorization", "")):
            ask = {"WWW-Authenticate": 'Basic realm="video", charset="UTF-8"'}
            return PlainTextResponse("This server asks for a user and a password.", 401, ask)
        if path.startswith(CLOSED) or not _own_file(path):
            return PlainTextResponse("This server has no such page and fetches no addresses.", 404)
        length = headers.get("content-length", "0")
        if not length.isdecimal() or int(length[:20]) > self._limit(path):
            return _too_large(self._limit(path))
        if path.startswith(UPLOAD) and _bytes_below(self.uploads()) > self.hosting.uploads_gib * GIB:
            log.warning("%s holds more than %d GiB (ENGINE_UPLOADS_GIB)", self.uploads(), self.hosting.uploads_gib)
            return PlainTextResponse("Too many uploads are kept here at the moment. Try again tomorrow.", 507)
        return None

    def _allowed(self, given: str) -> bool:
        if self._token is None:
            return True
        scheme, _, encoded = given.partition(" ")
        try:
            token = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            return False
        # In the same time whether the first letter is wrong or the last.
        return scheme.lower() == "basic" and hmac.compare_digest(token, self._token)

    def _limit(self, path: str) -> int:
        return self.largest if path.startswith(UPLOAD) else LARGEST_CALL

    async def _pass_on(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count what comes, since a length need not be announced."""
        limit, taken, begun = self._limit(scope["path"]), 0, False

        async def counted() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > limit:
                raise TooLargeError
            return message

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            await self.app(scope, counted, watched)
        except TooLargeError:
            if begun:
                raise
            await _too_large(limit)(scope, receive, send)
        except asyncio.CancelledError:
            # Only the server does this, when it ends and a page has kept its connection: no fault to show at length.
            log.debug("%s was cut off", scope["path"])


def _own_file(path: str) -> bool:
    """Whether a path that asks Gradio for a file asks for one of this disk that may be seen; it would fetch
    addresses, too."""
    for prefix in ("/gradio_api/file=", "/gradio_api/file/"):
        if path.startswith(prefix):
            return path[len(prefix) :].startswith("/") and "://" not in path and HIDDEN not in path
    return True


def _too_large(limit: int) -> PlainTextResponse:
    return PlainTextResponse(f"That is too large: at most {limit} bytes are taken here.", 413)


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder; files may come and go meanwhile."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total

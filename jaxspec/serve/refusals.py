"""Write errors in OpenAI's form: one that a client can correct, or "internal error"."""

from __future__ import annotations

import re

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from jaxspec.errors import InputError, printable
from jaxspec.serve.answers import error_body
from jaxspec.serve.bodies import NotServed
from jaxspec.serve.worker import Full, Late, Unready

SERVED = "/, /health, /metrics, /v1/models, /v1/chat/completions and /v1/completions"
"""Paths, as an error lists them."""
LONGEST = 500
"""Maximum characters of an error's message."""
TOO_LONG = re.compile(r"prompt tokens: |prompt: \d+ tokens and |.*: the prompt is far over ")
"""Messages of errors that a shorter conversation mends."""


def described(error: Exception) -> tuple[int, str, str]:
    """Return the status, message and type of an error."""
    match error:
        case NotServed():
            return 404, printable(str(error))[:LONGEST], "invalid_request_error"
        case InputError():  # it may quote half a character, which no encoding has
            return 400, printable(str(error))[:LONGEST], "invalid_request_error"
        case Full():
            return 429, "the queue is full; try again later", "rate_limit_error"
        case Unready():
            return 503, "the server is warming up or ending; try again later", "server_error"
        case Late():
            return 504, "the answer was not whole in time; ask for fewer tokens", "timeout_error"
        case HTTPException(status_code=404, detail="Not Found"):
            return 404, f"no such path; {SERVED} are served", "invalid_request_error"
        case HTTPException():
            return error.status_code, str(error.detail), "invalid_request_error"
    return 500, "internal error", "server_error"


async def refused(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed."""
    status, message, kind = described(error)
    param = re.match(r"[a-z_]+(?=[:.\[])", message)
    wait = {Full: getattr(error, "seconds", 1), Unready: 5}.get(type(error))
    headers = {} if wait is None else {"Retry-After": str(wait)}
    code = "context_length_exceeded" if TOO_LONG.match(message) else None
    code = "model_not_found" if isinstance(error, NotServed) else code
    body = error_body(message, kind, param and param[0], code)
    return JSONResponse(body, status, headers | (getattr(error, "headers", None) or {}))


async def left(request: Request, error: Exception) -> Response:
    """Return an empty response for a client that has disconnected."""
    return Response(status_code=499)

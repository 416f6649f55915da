"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from typing import Any, ClassVar

import structlog
from aiohttp import web

log = structlog.get_logger(__name__)

_MAX_TEXT = 1000


class ProxyError(Exception):
    """What a request is answered instead: `status`, and `field`, the key of the client's body
    that is wrong, if one is.
    """

    status: ClassVar[int]
    field = ""


class BadRequest(ProxyError):
    """The client's body cannot be served."""

    status = 400

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}" if field else text)
        self.field = field


class TooLarge(ProxyError):
    """The client asks for more than the proxy would hold at once."""

    status = 413


class NoNode(ProxyError):
    """No engine of the kind that is needed takes the request; the text says why."""

    status = 503


class DecodeBroken(ProxyError):
    """A D engine broke off, or its answer cannot be read; the text says which and how."""

    status = 502


def error_body(status: int, text: str, field: str = "") -> dict[str, Any]:
    """What an error answer says. `field`: the key of the client's body that is wrong."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    said = text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}..."
    return {"error": {"message": said, "type": kind, "param": field or None, "code": status}}


def answer(status: int, text: str, field: str = "") -> web.Response:
    """An error answer."""
    return web.json_response(error_body(status, text, field), status=status)


@web.middleware
async def openai_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Whatever goes wrong in a handler is answered in OpenAI's shape."""
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except ProxyError as error:
        return answer(error.status, str(error), error.field)
    except RecursionError:
        return answer(400, "the body is nested too deeply")
    except web.HTTPRequestEntityTooLarge as error:
        return answer(413, error.text or error.reason)
    except web.HTTPException as error:
        return answer(error.status, f"{request.method} {request.path}: {error.reason}")
    except web.RequestPayloadError as error:
        return answer(400, f"the body cannot be read: {error}")
    except ConnectionError:
        raise  # The client is gone: nobody is there to be answered.
    except Exception as error:
        log.exception("request failed", path=request.path)
        return answer(500, f"the proxy failed at this request: {type(error).__name__}")

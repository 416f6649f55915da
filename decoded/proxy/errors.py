"""Errors in the shape that OpenAI's clients know."""

from __future__ import annotations

from aiohttp import web


class BadRequest(ValueError):
    """The client's body cannot be served. `field`: which key is wrong."""

    def __init__(self, field: str, text: str) -> None:
        super().__init__(f"{field}: {text}" if field else text)
        self.field = field


class NoNode(Exception):
    """No engine of the kind that is needed takes the request; the text says why."""


def answer(status: int, text: str, field: str = "") -> web.Response:
    """An error answer."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": text, "type": kind, "param": field or None, "code": status}
    return web.json_response({"error": error}, status=status)

"""Log lines on standard error, as JSON or for the eye.

Use `structlog.get_logger()` and say what a line is about with `request_id`, `engine_id`
and `rank`. Lines of the standard library's `logging` come out the same way.
"""

from __future__ import annotations

import atexit
import json
import logging
import queue
import sys
import threading
from typing import Any, Literal, TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["auto", "console", "json"]

# What a line begins with, in this order, if it is there.
_FIRST_KEYS = ("time", "level", "event", "request_id", "engine_id", "rank")
_MAX_WAITING_LINES = 10_000
_BATCH = 256

_writer: BackgroundWriter | None = None


class BackgroundWriter:
    """A text sink whose `write` never blocks: a thread of its own writes to `stream`.

    While the stream takes nothing, up to `max_lines` lines wait; further ones are
    dropped, counted in `dropped`, and told about once the stream takes lines again.
    """

    def __init__(self, stream: TextIO, max_lines: int = _MAX_WAITING_LINES) -> None:
        self.dropped = 0
        self._told = 0
        self._stream = stream
        self._lines: queue.Queue[str | None] = queue.Queue(max_lines)
        self._thread = threading.Thread(target=self._run, name="decoded-log", daemon=True)
        self._thread.start()

    def write(self, text: str) -> None:
        """Hand a line over."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Nothing: the thread flushes after each write."""

    def close(self, timeout_s: float = 1.0) -> None:
        """Write what waits, but for no longer than `timeout_s`; then drop the rest."""
        try:
            self._lines.put(None, timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout_s)

    def _run(self) -> None:
        ended = False
        while not ended:
            lines = [self._lines.get()]
            # One write for all that waits: the thread takes less of the interpreter's time.
            while len(lines) < _BATCH and not self._lines.empty():
                lines.append(self._lines.get_nowait())
            ended = None in lines
            texts = [line for line in lines if line is not None]
            missing = self.dropped - self._told
            if missing:
                texts.append(_lost(missing))
            try:
                self._stream.write("".join(texts))
                self._stream.flush()
                self._told += missing
            except (OSError, ValueError):
                # The reader of the log is gone or the stream was closed; nobody can be told.
                self.dropped += len(lines) - ended


def configure(level: Level = "info", format: Format = "auto", stream: TextIO | None = None) -> None:
    """Set up structlog and logging for this process; a later call replaces an earlier one.

    `stream`: standard error by default. `auto` is `console` on a terminal, else `json`.
    """
    global _writer  # noqa: PLW0603 - one log per process
    stream = stream or sys.stderr
    if _writer is not None:
        _writer.close()
    _writer = BackgroundWriter(stream)
    if format == "auto":
        format = "console" if stream.isatty() else "json"
    number = _LEVELS[level]
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    ending = _console(stream.isatty()) if format == "console" else _json()
    structlog.configure(
        processors=[*common, *ending],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(file=_writer),  # type: ignore[arg-type]
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(_writer)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *ending],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    logging.captureWarnings(True)


def flush(timeout_s: float = 1.0) -> None:
    """Wait until the lines logged so far are written, at most `timeout_s`; ends the log."""
    if _writer is not None:
        _writer.close(timeout_s)


_LEVELS: dict[str, int] = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _console(colors: bool) -> list[Processor]:
    renderer = structlog.dev.ConsoleRenderer(
        colors=colors,
        sort_keys=False,
        timestamp_key="time",
        exception_formatter=structlog.dev.plain_traceback,
    )
    return [_in_order, renderer]


def _json() -> list[Processor]:
    return [structlog.processors.format_exc_info, _in_order, _render_json]


def _in_order(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    ordered = {key: event.pop(key) for key in _FIRST_KEYS if key in event}
    ordered.update(event)
    return ordered


_encode = msgspec.json.Encoder(enc_hook=repr).encode


def _render_json(_logger: WrappedLogger, _method: str, event: Any) -> str:
    try:
        return _encode(event).decode()
    except (TypeError, ValueError, msgspec.MsgspecError):
        # Texts with lone surrogates, keys that are no text: rare, and json takes them.
        return json.dumps({str(key): value for key, value in event.items()}, default=repr)


def _lost(lines: int) -> str:
    event = {"level": "warning", "event": "log lines were dropped", "lines": lines}
    return json.dumps(event) + "\n"


atexit.register(flush)

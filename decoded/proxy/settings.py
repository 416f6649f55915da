"""What a proxy is told on its command line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Settings:
    """`decode`, `prefill`: base URLs of the engines. `advertise_url`: how D's daemons reach this
    proxy; None is the address it listens on. `port` 0 takes a free one. `late_prefill_s`: how
    much later than D a P engine may answer before its prefill is cancelled. `shutdown_s`: how
    long requests in flight may take at the end.
    """

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_url: str | None = None
    virtual: bool = False
    prefill_timeout_s: float = 300.0
    late_prefill_s: float = 1.0
    shutdown_s: float = 10.0
    max_body_bytes: int = 64 << 20

    def problems(self) -> list[str]:
        """Everything that is wrong, by flag."""
        found: list[str] = []
        if not self.decode:
            found.append("--decode: give the URL of at least one D engine")
        if not self.prefill and not self.virtual:
            found.append("--prefill: give the URL of at least one P engine, or --virtual")
        for flag, urls in (
            ("--decode", self.decode),
            ("--prefill", self.prefill),
            ("--advertise-url", (self.advertise_url,) if self.advertise_url else ()),
        ):
            found += [f"{flag}: {url!r} {why}" for url in urls if (why := _wrong(url))]
            found += [
                f"{flag}: {url!r} is given twice"
                for url in dict.fromkeys(urls)
                if urls.count(url) > 1
            ]
        if not 0 <= self.port <= 65535:
            found.append(f"--port: {self.port} is no port")
        if not 0 < self.prefill_timeout_s < math.inf:
            found.append("--prefill-timeout: has to be a number of seconds, more than 0")
        if self.host in ("0.0.0.0", "::") and not self.advertise_url and not self.virtual:
            found.append(
                f"--advertise-url: needed with --host {self.host}: where D's daemons "
                "reach this proxy"
            )
        return found


def _wrong(url: str) -> str:
    """What is wrong with an engine's URL, or this proxy's; empty if nothing is."""
    try:
        split = urlsplit(url)
        host = (split.hostname or "").encode("idna")
        good = split.scheme in ("http", "https") and bool(host) and split.port != 0
    except ValueError:
        good = False
    if not good or any(char.isspace() for char in url):
        return "is no URL like http://host:port"
    if split.query or split.fragment:
        return "has a query or a fragment; leave it off"
    if split.path.rstrip("/").endswith("/v1"):
        return "ends with /v1; leave it off"
    return ""

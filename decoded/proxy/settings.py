"""What a proxy is told on its command line."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Settings:
    """`decode`, `prefill`: base URLs of the engines. `advertise_url`: how D's daemons reach this
    proxy; None is the address it listens on. `port` 0 takes a free one.
    """

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    advertise_url: str | None = None
    virtual: bool = False
    prefill_timeout_s: float = 300.0
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
            found += [
                f"{flag}: {url!r} is no URL like http://host:port" for url in urls if not _good(url)
            ]
        if not 0 <= self.port <= 65535:
            found.append(f"--port: {self.port} is no port")
        if self.prefill_timeout_s <= 0:
            found.append("--prefill-timeout: has to be more than 0 s")
        if self.host in ("0.0.0.0", "::") and not self.advertise_url and not self.virtual:
            found.append(
                f"--advertise-url: needed with --host {self.host}: where D's daemons "
                "reach this proxy"
            )
        return found


def _good(url: str) -> bool:
    try:
        split = urlsplit(url)
        return split.scheme in ("http", "https") and bool(split.hostname) and split.port != 0
    except ValueError:
        return False

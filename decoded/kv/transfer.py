"""One Mooncake transfer engine: registered memory that peers write to, and writes to peers.

Facts without another source were measured with mooncake-transfer-engine-non-cuda
0.3.13.post1 on loopback TCP.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from .listener import hasten, listening_ports
from .loading import PROTOCOLS, TransferError, load_mooncake

__all__ = ["PROTOCOLS", "TransferEngine", "TransferError", "session_name", "transfer_timeout_s"]

_REGISTER_ERRORS = {-1: "it is empty", -7: "it overlaps memory that is registered already"}
_OPEN_TRIES = 32
_PORTS_REMEMBERED = 512


def transfer_timeout_s(size: int = 0) -> float:
    """Longest time in seconds that one synchronous write of `size` bytes takes here.

    Mooncake reads MC_TRANSFER_TIMEOUT (whole seconds, 30 by default, never less than
    5) when an engine is opened, and adds a second per 10**9 bytes of the batch
    (transfer_engine_py.cpp).
    """
    text = os.environ.get("MC_TRANSFER_TIMEOUT", "30")
    try:
        base = int(text)
    except ValueError:
        base = 0
    return max(5, base) + size / 1e9


class TransferEngine:
    """A Mooncake engine of this process. Everything here blocks and may be called from any
    thread; with `ascend`, `open` must run in the thread that has set the device.

    Several can be open at once, all of one protocol. Memory that one of them has
    registered must stay mapped until `close` has returned.
    """

    def __init__(self, engine: Any, host: str, ports: frozenset[int]) -> None:
        """Use `open`. Takes over `engine`: the caller must not keep a reference."""
        self._engine = engine
        self.host = host
        self.port: int = engine.get_rpc_port()
        self.ports = ports | {self.port}
        self._regions: dict[int, int] = {}
        self._calls = 0
        self._closing = False
        self._idle = threading.Condition()

    @classmethod
    def open(cls, host: str, protocol: str = "tcp", device: str = "") -> TransferEngine:
        """Start an engine whose session is `host:port`; about 2 ms with TCP.

        `host`: this node as its peers reach it. `device`: the RDMA devices to use,
        separated by commas; "" uses all. The engine listens on all addresses
        (MC_TCP_BIND_ADDRESS narrows it) on `port` and, with TCP, on a second one, both
        random in MC_MIN_RPC_PORT..MC_MAX_RPC_PORT (15000..17000). The ports differ from
        those of engines closed in this process, so that a producer that still has
        an older engine's addresses never reaches a newer one.

        Raises TransferError when the wheel, the protocol, the device or the host does not fit.
        """
        if ":" in host:
            # Without it Mooncake looks an IPv6 address up as an IPv4 name, and fails.
            os.environ.setdefault("MC_USE_IPV6", "1")
        with _opening:
            module = load_mooncake(protocol, device)
            if not host or any(each.isspace() for each in host):
                raise TransferError(f"{host!r} is no host name or address")
            rejected: list[TransferEngine] = []
            try:
                for _ in range(_OPEN_TRIES):
                    before = listening_ports()
                    engine = module.TransferEngine()
                    status = engine.initialize(host, "P2PHANDSHAKE", protocol, device)
                    if status != 0:
                        raise TransferError(
                            f"Mooncake could not start with protocol {protocol} on {host} (status "
                            f"{status}); its reason is on standard error. Are the ports "
                            "MC_MIN_RPC_PORT..MC_MAX_RPC_PORT free?"
                        )
                    opened = cls(engine, host, listening_ports() - before)
                    del engine
                    if opened.ports.isdisjoint(_used_ports):
                        return opened
                    rejected.append(opened)
            finally:
                for each in rejected:
                    each._destroy()
        raise TransferError(
            f"Mooncake found no port that was not used before in {_OPEN_TRIES} tries; "
            "widen MC_MIN_RPC_PORT..MC_MAX_RPC_PORT"
        )

    @property
    def session(self) -> str:
        """What a peer passes to `write` to reach this engine."""
        return session_name(self.host, self.port)

    @property
    def regions(self) -> dict[int, int]:
        """Size of each registered region by its address."""
        return dict(self._regions)

    @property
    def closed(self) -> bool:
        return self._closing

    def register(self, address: int, size: int) -> None:
        """Let peers write to, and this engine send from, `size` bytes at `address`.

        Microseconds with TCP; RDMA pins the pages first. Mooncake registers without
        the GIL. Raises TransferError for an empty range and one that overlaps
        another of this engine; engines of one process may register the same memory.
        """
        with self._call("register memory"):
            status = self._engine.batch_register_memory([address], [size])
            if status != 0:
                why = _REGISTER_ERRORS.get(status, "its reason is on standard error")
                raise TransferError(
                    f"Mooncake refused {size} bytes at {address:#x}: {why} (status {status})"
                )
            self._regions[address] = size

    def unregister(self, address: int) -> None:
        """Refuse transfers to the region at `address` that begin from now on.

        This is not a fence: TCP checks an address once per block, so a block that is
        on its way still arrives in full afterwards. Use `close` to be rid of writers.
        Raises TransferError if no region begins there.
        """
        with self._call("unregister memory"):
            status = self._engine.batch_unregister_memory([address])
            if status != 0:
                raise TransferError(
                    f"no memory is registered at {address:#x} (Mooncake's status {status})"
                )
            self._regions.pop(address, None)

    def write(
        self, session: str, src: Sequence[int], dst: Sequence[int], lengths: Sequence[int]
    ) -> None:
        """Write `lengths[i]` bytes from `src[i]` here to `dst[i]` there, for all i.

        Returns when every byte is in the peer's memory: with TCP its engine
        acknowledges each piece. Takes `transfer_timeout_s` at most, once the session
        is open; opening one to a host that does not answer takes up to 65 s. Runs
        without the GIL, but spins. Zero lengths and empty lists are written at once.

        Raises TransferError if any piece failed. Others may have been written, and
        after a time-out Mooncake may still be writing: only the peer's `close` ends that.
        """
        if not len(src) == len(dst) == len(lengths):
            raise TransferError(
                f"{len(src)} sources, {len(dst)} destinations and {len(lengths)} lengths "
                "do not belong together"
            )
        with self._call("write"):
            try:
                status = self._engine.batch_transfer_sync_write(session, src, dst, lengths)
            except TypeError:
                raise TransferError("addresses and lengths are integers from 0 on") from None
            if status != 0:
                raise TransferError(
                    f"writing {len(lengths)} pieces, {sum(lengths)} bytes in all, to {session} "
                    f"failed (Mooncake's status {status}): the peer is gone or has fenced the "
                    "memory, an address is not registered there, or it took too long"
                )

    def close(self) -> None:
        """The fence: when this returns, no peer can write to this process through the engine.

        It waits for this engine's own calls to end, then destroys it. The destructor
        closes the listening ports and every connection and joins the threads that
        copy from them into memory, so a block that was on its way stays cut off where it is:
        512 MiB in flight stopped at 65 MiB, the writer got its error at once, and
        so did later writes to this session. Afterwards the memory may be
        unmapped. 1 to 14 ms with TCP, mostly with the GIL held; `decoded.kv.listener`
        tells what would make it seconds. 50 cycles of open, register and close leave no
        descriptor and no thread behind. Closing again is harmless.

        With RDMA and Ascend the same destructor releases queue pairs and
        registrations; that was not measured.

        Raises TransferError if something else in the process keeps the engine alive: then
        nothing is fenced.
        """
        with self._idle:
            self._closing = True
            self._idle.wait_for(lambda: not self._calls)
            if self._engine is None:
                return
            self._destroy()

    def __enter__(self) -> TransferEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TransferEngine({self.session}{', closed' if self._closing else ''})"

    def _destroy(self) -> None:
        _used_ports.extend(self.ports)
        alive = weakref.ref(self._engine)
        hasten(self.port)
        self._engine = None
        self._regions.clear()
        if alive() is not None:
            raise TransferError(f"the engine {self.session} is still referred to: not fenced")

    @contextmanager
    def _call(self, what: str) -> Iterator[None]:
        """Keep the engine from being destroyed while it is in use.

        Callers reach it as `self._engine` only: a local name would live on in the
        traceback of an error and keep the engine open.
        """
        with self._idle:
            if self._closing:
                raise TransferError(f"cannot {what}: the engine {self.session} is closed")
            self._calls += 1
        try:
            yield
        finally:
            with self._idle:
                self._calls -= 1
                self._idle.notify_all()


def session_name(host: str, port: int) -> str:
    """Mooncake's name of the engine on `host` (IPv6 without brackets) with RPC port `port`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


_opening = threading.Lock()
_used_ports: deque[int] = deque(maxlen=_PORTS_REMEMBERED)

"""The call to the proxy: what it says, and what each kind of answer does to the request."""

from __future__ import annotations

import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import which
from typing import Any

import pytest

from decoded.testing import BareClient, DaemonProcess
from decoded.wire import link as wire
from decoded.wire import side_channel as sc

from .proxy import Proxy
from .support import (
    CONFIG,
    HOST,
    Producer,
    advertised,
    barrier,
    free_port,
    outcome,
    real,
    register,
    request_of,
    submit,
    unique,
    until,
)

TIMES: dict[str, Any] = {
    **CONFIG,
    "deadlines": {**CONFIG["deadlines"], "done_s": 0.3},
    "metaserver": {**CONFIG["metaserver"], "connect_timeout_s": 0.3, "total_timeout_s": 0.5},
    "transfer": {"timeout_s": 0.4},
}


@pytest.fixture(scope="module")
def daemon() -> Iterator[DaemonProcess]:
    with DaemonProcess(TIMES) as daemon:
        yield daemon


class Engine:
    """A scheduler whose one rank has registered."""

    def __init__(self, daemon: DaemonProcess, stack: ExitStack) -> None:
        self.daemon = daemon
        self.name = unique("engine")
        self.scheduler = stack.enter_context(BareClient(daemon.endpoint))
        self.scheduler.hello(self.name)
        worker = stack.enter_context(BareClient(daemon.endpoint))
        worker.hello(self.name, role="worker", session="w", subscribe=False)
        self.registered = register(worker, advertised())

    def submit(self, url: str, name: str = "r", **fields: Any) -> None:
        submit(self.scheduler, real(name, url, **fields))

    def ended(self) -> wire.OutcomeItem:
        return outcome(self.scheduler)

    def request(self, name: str = "r") -> dict[str, Any]:
        barrier(self.scheduler)
        return request_of(self.daemon, self.name, name)

    def drained_s(self, name: str = "r") -> float:
        """How long an ended request drained: exactly 0 if it was over in the same event."""
        at = {each["what"]: float(each["at_s"]) for each in self.request(name)["story"]}
        return at[self.request(name)["state"]] - at["draining"]


@pytest.fixture
def engine(daemon: DaemonProcess) -> Iterator[Engine]:
    with ExitStack() as stack:
        yield Engine(daemon, stack)


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    with Proxy() as proxy:
        yield proxy


def test_the_body_has_every_key_that_the_proxy_needs(
    daemon: DaemonProcess, engine: Engine, proxy: Proxy
) -> None:
    engine.submit(proxy.url, "r1")
    engine.submit(proxy.url, "r2", cached_tokens=17)
    bodies = {call.body["request_id"]: call.body for call in (proxy.next(), proxy.next())}
    boot, generation = daemon.status()["boot"], engine.registered.generation
    expected = {
        "token_ids": [],
        "request_id": "x-r1",
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": [[3, 1, 2]],
        "remote_block_size": [16],
        "remote_engine_id": f"{engine.name}.{boot}.{generation}",
        "remote_host": HOST,
        "remote_port": engine.registered.side_channel_port,
        "remote_tp_size": 1,
        "remote_pcp_size": 1,
        "remote_dcp_size": 1,
        "remote_cached_tokens": 0,
    }
    assert bodies["x-r1"] == expected
    assert bodies["x-r2"] == {**expected, "request_id": "x-r2", "remote_cached_tokens": 17}


def test_200_and_done_in_either_order(engine: Engine, proxy: Proxy) -> None:
    with Producer(engine.registered.side_channel_port) as producer:
        engine.submit(proxy.url, "r1")
        proxy.next().answer()
        assert producer.ask(sc.Done("x-r1", 1, "p:1")) == b"ACK"
        assert engine.ended().state == "done"


def test_200_without_done_is_overdue(engine: Engine, proxy: Proxy) -> None:
    engine.submit(proxy.url)
    proxy.next().answer()
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("expired", "done_overdue")
    assert "rank 0 heard nobody" in ended.detail


def test_404_fails_at_once(engine: Engine, proxy: Proxy) -> None:
    engine.submit(proxy.url)
    proxy.next().answer(404, "who is that?")
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "prefill_failed")
    assert "HTTP 404: who is that?" in ended.detail
    assert engine.drained_s() == 0


@pytest.mark.parametrize("status", [502, 500, 201, 401])
def test_another_status_fails_after_the_drain(engine: Engine, proxy: Proxy, status: int) -> None:
    engine.submit(proxy.url)
    proxy.next().answer(status, "x" * 10**6)
    assert engine.request()["state"] in ("receiving", "draining")
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "prefill_failed")
    assert f"HTTP {status}: xxx" in ended.detail
    assert len(ended.detail) < 500
    assert engine.drained_s() >= TIMES["transfer"]["timeout_s"]


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(engine: Engine, proxy: Proxy, status: int) -> None:
    engine.submit(proxy.url)
    proxy.next().answer(status, headers={"Location": "/login"})
    assert until(lambda: engine.request()["state"] == "draining")
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "prefill_failed")
    assert f"HTTP {status} to /login is not followed" in ended.detail
    assert (proxy.others, proxy.waiting) == ([], 0)


def test_nobody_listening_fails_at_once_after_the_retries(engine: Engine) -> None:
    engine.submit(f"http://{HOST}:{free_port()}/v1/metaserver")
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "prefill_failed")
    assert "cannot be reached" in ended.detail
    assert engine.drained_s() == 0


def test_a_proxy_that_starts_late_is_reached_by_a_retry() -> None:
    port = free_port()
    slow = {"metaserver": {"retries": 8, "backoff_s": 0.2}}
    config = {**TIMES, **slow, "log": {"level": "debug"}}
    with DaemonProcess(config) as daemon, ExitStack() as stack:
        engine = Engine(daemon, stack)
        engine.submit(f"http://{HOST}:{port}/v1/metaserver")
        until(lambda: engine.request() and "metaserver unreachable" in daemon.log)
        proxy = stack.enter_context(Proxy(port=port))
        assert proxy.next().body["request_id"] == "x-r"
        assert proxy.waiting == 0


def test_no_answer_in_time_says_nothing_about_the_prefill(engine: Engine, proxy: Proxy) -> None:
    engine.submit(proxy.url)
    proxy.next()
    until(lambda: "prefill out of sight" in {e["what"] for e in engine.request()["story"]})
    assert engine.request()["state"] == "receiving"
    with Producer(engine.registered.side_channel_port) as producer:
        assert producer.ask(sc.Done("x-r", 1, "p:1")) == b"ACK"
    assert engine.ended().state == "done"


def test_no_answer_and_no_done_ends_at_the_requests_deadline(engine: Engine, proxy: Proxy) -> None:
    engine.submit(proxy.url, timeout_s=0.7)
    proxy.next()
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("expired", "deadline")
    assert "did not answer within 0.5 s" in ended.detail


def test_a_connection_that_breaks_is_not_tried_again(engine: Engine, proxy: Proxy) -> None:
    engine.submit(proxy.url, timeout_s=0.5)
    proxy.next().hang_up()
    until(lambda: "prefill out of sight" in {e["what"] for e in engine.request()["story"]})
    assert engine.ended().state == "expired"
    assert proxy.waiting == 0


def test_a_status_counts_even_if_its_text_never_comes(engine: Engine) -> None:
    with socket.create_server((HOST, 0)) as server:
        engine.submit(f"http://{HOST}:{server.getsockname()[1]}/v1/metaserver", timeout_s=60.0)
        peer, _ = server.accept()
        with peer:
            peer.recv(65_536)
            peer.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 10\r\n\r\n")
            ended = engine.ended()
    assert (ended.state, ended.reason, ended.detail) == ("failed", "prefill_failed", "HTTP 404")


@pytest.mark.parametrize(
    "answer", [b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 9999]
)
def test_what_is_not_http_says_nothing_about_the_prefill(engine: Engine, answer: bytes) -> None:
    with socket.create_server((HOST, 0)) as server:
        engine.submit(f"http://{HOST}:{server.getsockname()[1]}/v1/metaserver", timeout_s=0.5)
        peer, _ = server.accept()
        with peer:
            peer.recv(65_536)
            peer.sendall(answer)
            until(lambda: "prefill out of sight" in {e["what"] for e in engine.request()["story"]})
    assert engine.ended().state == "expired"


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://[",
        "http://host:99999/",
        f"http://{'a' * 70}/",
        "http://..x/",
        "http://127.0.0.1:0/",
        f"http://[/{'x' * 10**6}",
    ],
)
def test_a_url_that_cannot_be_called_fails_at_once(engine: Engine, url: str) -> None:
    engine.submit(url)
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "prefill_failed")
    assert "metaserver" in ended.detail or "cannot be reached" in ended.detail
    assert len(ended.detail) < 1_000
    assert engine.drained_s() == 0


@pytest.mark.parametrize("url", ["", "ftp://x/", "file:///etc/passwd", None, 5, ["http://x/"]])
def test_a_metaserver_that_is_no_http_url_is_told_so(engine: Engine, url: Any) -> None:
    engine.submit(url)
    ended = engine.ended()
    assert (ended.state, ended.reason) == ("failed", "no_metaserver")
    assert "kv_transfer_params.metaserver" in ended.detail


def test_a_request_without_any_parameters_has_no_metaserver(engine: Engine) -> None:
    submit(engine.scheduler, wire.Submission("r", "x", [[1, 2, 3]], 40))
    assert engine.ended().reason == "no_metaserver"


def test_a_cancelled_request_gives_up_its_call_when_it_has_ended(
    engine: Engine, proxy: Proxy
) -> None:
    engine.submit(proxy.url)
    call = proxy.next()
    engine.scheduler.send(wire.Cancel([wire.Cancellation("r")]))
    assert engine.request()["state"] == "draining"
    call.answer(404)
    assert engine.ended().state == "cancelled"
    assert until(lambda: engine.daemon.status()["metaserver_calls"] == 0)


def openssl(*args: str) -> None:
    subprocess.run(["openssl", *args], check=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for the loopback address, and its key."""
    if which("openssl") is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=test"),
        *("-addext", f"subjectAltName=IP:{HOST}"),
    )
    return cert, key


@pytest.mark.parametrize("trusted", [True, False])
def test_https_needs_a_certificate_that_is_trusted(
    certificate: tuple[Path, Path], trusted: bool
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    tls = {"tls": {"ca_file": str(certificate[0])}} if trusted else {}
    config = {**TIMES, "metaserver": {**TIMES["metaserver"], **tls}}
    with Proxy(tls=context) as proxy, DaemonProcess(config) as daemon, ExitStack() as stack:
        engine = Engine(daemon, stack)
        engine.submit(proxy.url)
        if trusted:
            proxy.next().answer(404)
            assert "HTTP 404" in engine.ended().detail
        else:
            ended = engine.ended()
            assert (ended.state, ended.reason) == ("failed", "prefill_failed")
            assert "certificate" in ended.detail.lower()
            assert proxy.waiting == 0

"""docs/protocol.md is complete, and true: against the code, the golden bytes and a daemon."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from decoded.core import reasons
from decoded.core.request import Verdict
from decoded.core.states import State
from decoded.receiver.path import Destination, announcement
from decoded.testing import DaemonProcess
from decoded.wire import layout, link, side_channel

from . import pages
from .plain_client import Peer, PlainClient

PAGE = pages.read("docs/protocol.md")
GOLDEN = pages.ROOT / "tests" / "wire" / "golden"
CLIENT_KINDS: tuple[type[link.Message], ...] = link.FromClient.__args__
DAEMON_KINDS: tuple[type[link.Message], ...] = link.FromDaemon.__args__
# Its rows stand where a client sends it; the daemon's answer is the same.
KINDS = dict.fromkeys((*CLIENT_KINDS, *DAEMON_KINDS))
MAPS: tuple[type[msgspec.Struct], ...] = (
    link.Submission,
    link.Cancellation,
    link.OutcomeItem,
    link.Refusal,
    *layout.KvMemory.__args__,
    layout.KvLayout,
    layout.Region,
    layout.NpuHandle,
    layout.KvGroup,
    layout.KvLayer,
    layout.KvTensor,
)


def tag(kind: type[msgspec.Struct]) -> str:
    return str(kind.__struct_config__.tag)


def structs_of(module: Any) -> set[type[msgspec.Struct]]:
    return {
        each
        for each in vars(module).values()
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and each.__module__ == module.__name__
        and not each.__name__.startswith("_")
    }


@pytest.mark.parametrize("kind", KINDS, ids=tag)
def test_every_message_is_described(kind: type[link.Message]) -> None:
    described = pages.rows(pages.section(PAGE, f"`{tag(kind)}`"))
    assert {key: cells[:2] for key, cells in described.items()} == pages.struct_rows(kind)


@pytest.mark.parametrize("struct", MAPS, ids=lambda struct: struct.__name__)
def test_every_map_in_a_message_is_described(struct: type[msgspec.Struct]) -> None:
    text = pages.section(PAGE, struct.__name__)
    described = pages.rows(text)
    assert {key: cells[:2] for key, cells in described.items()} == pages.struct_rows(struct)
    if struct in layout.KvMemory.__args__:
        assert tag(struct) in pages.names(text)


def test_no_struct_of_the_wire_is_left_out() -> None:
    assert structs_of(link) | structs_of(layout) == {*KINDS, *MAPS, link.Message}


def test_no_message_is_described_that_is_not_there() -> None:
    headings = {line[5:-1] for line in PAGE.splitlines() if line.startswith("### `")}
    assert headings == {tag(kind) for kind in KINDS}


def test_limits_and_version() -> None:
    assert f"This is protocol version {link.PROTOCOL_VERSION}." in PAGE
    assert f"{link.MAX_FRAME_BYTES // 2**20} MiB ({link.MAX_FRAME_BYTES} bytes)" in PAGE
    assert f"at most {side_channel.MAX_REQUEST_BYTES // 2**10} KiB" in PAGE


def test_every_reason_is_described() -> None:
    outcomes = pages.rows(pages.section(PAGE, "Reasons of outcomes"))
    refusals = pages.rows(pages.section(PAGE, "Reasons of refusals"))
    known = {value for name, value in vars(reasons).items() if name.isupper()}
    # A submission that can be read but makes no sense is refused by the link, not by the core.
    assert outcomes.keys() | refusals.keys() == known | {"invalid"}
    assert not outcomes.keys() & refusals.keys()
    assert {cells[0] for cells in outcomes.values()} == {s.value for s in State if s.terminal}


def test_every_error_code_is_described() -> None:
    assert pages.rows(pages.section(PAGE, "Error codes")).keys() == set(error_codes())


def error_codes() -> Iterator[str]:
    """Every code that the package puts into an `error` message, found where it is made."""
    makers = {"WireError": 0, "RegistrationError": 0, "PoolError": 0, "_refuse": 2}
    package = pages.ROOT / "decoded"
    for path in (*package.glob("edges/*.py"), *package.glob("receiver/*.py"), Path(link.__file__)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                at = makers.get(name)
                if at is not None and len(node.args) > at:
                    yield from texts(node.args[at])
            elif isinstance(node, ast.FunctionDef) and node.name == "_why_not":
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Tuple):
                        yield from texts(inner.value.elts[0])
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "code":
                yield from texts(node.value)


def texts(node: ast.expr) -> Iterator[str]:
    """A literal text, or those of both branches."""
    if isinstance(node, ast.IfExp):
        yield from (*texts(node.body), *texts(node.orelse))
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


# Examples


def as_json(value: Any) -> Any:
    """msgpack's bin has no JSON; the page writes it as {"bin": text}."""
    if isinstance(value, bytes):
        return {"bin": value.decode()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return value


def golden_frames() -> set[bytes]:
    vectors = [
        vector
        for path in GOLDEN.glob("*.json")
        for vector in json.loads(path.read_text())["vectors"]
    ]
    return {bytes.fromhex(v.get("frame_hex") or v["payload_hex"]) for v in vectors}


def test_examples_mean_what_the_page_says() -> None:
    golden = golden_frames()
    found = list(pages.examples(PAGE))
    for frame, meaning in found:
        assert frame in golden
        assert as_json(msgspec.msgpack.decode(frame)) == meaning
    kinds = {meaning["kind"] for _, meaning in found if "kind" in meaning}
    assert {"hello", "welcome", "register_kv", "submit", "finished", "acknowledge"} <= kinds
    tags = {meaning[0]["bin"] for _, meaning in found if isinstance(meaning, list)}
    assert {"get_meta_msg", "done_sending_msg", "layers_in_msg"} <= tags


# The side channel and the metaserver


def test_side_channel_messages_are_described() -> None:
    text = pages.section(PAGE, "Messages to a D rank")
    for each in side_channel.Tag:
        assert f'bin "{each.value.decode()}"' in text
        assert f"| {each.name}" in text
    described = {key: cells[:2] for key, cells in pages.rows(text).items()}
    needed: dict[str, list[str]] = {}
    for kind in side_channel.Request.__args__:
        needed |= pages.struct_rows(kind)
    assert described == needed


def test_metadata_is_described() -> None:
    described = pages.rows(pages.section(PAGE, "Metadata"))
    of_layer = pages.struct_rows(side_channel.LayerMetadata)
    top = {"te_rpc_port", "layer_metadata", side_channel.PROGRESS_KEY}
    assert described.keys() == top | of_layer.keys()
    assert {k: described[k][0] for k in of_layer} == {k: row[0] for k, row in of_layer.items()}


def test_the_metaserver_post_is_described() -> None:
    request: Any = type("Request", (), {"external_id": "x", "blocks": [], "cached_tokens": 0})
    kv = layout.KvLayout([], [], [])
    body = announcement(request, Destination(kv, "h", 1, "e", 1, 1, 1))
    assert body.keys() <= pages.names(pages.section(PAGE, "The metaserver POST"))


# A daemon, and a client that knows this page only


def keys_of(value: Any) -> set[str]:
    """Every key in a status report, but those of `counters` and `states`, which are names."""
    if isinstance(value, list):
        return set().union(*(keys_of(item) for item in value))
    if not isinstance(value, dict):
        return set()
    inner = (keys_of(v) for key, v in value.items() if key not in ("counters", "states"))
    return set(value) | set().union(*inner)


def test_status_report_has_the_keys_described(tmp_path: Path) -> None:
    """With an engine, a registration and a request that producers are at work on."""
    with (
        DaemonProcess(folder=tmp_path) as daemon,
        Peer() as peer,
        PlainClient(daemon.endpoint, "engine", "scheduler") as scheduler,
        PlainClient(daemon.endpoint, "engine", "worker") as worker,
    ):
        port = worker.register_transfer()["side_channel_port"]
        scheduler.submit("r-1", "r", [[1]], 16, metaserver=peer.url)
        announced = peer.accept()
        assert announced["request_id"] == "r"
        layers = msgspec.msgpack.encode([b"layers_in_msg", "r", 2, "p:1", 0, 1])
        assert peer.ask(port, layers) == b"ACK"
        status = scheduler.status(request_id="r-1")
        [request] = status["requests"]
        assert request["ranks"][0]["senders"][0]["layers_in"] == 1
        scheduler.cancel("r-1")
        for sender in ("p:1", "p:2"):
            done = msgspec.msgpack.encode([b"done_sending_msg", "r", 2, sender])
            assert peer.ask(port, done) == b"ACK"
        assert scheduler.outcomes(1)["r-1"] == ("cancelled", "cancelled")
        ended = scheduler.status(request_id="r-1")
    described = {
        key
        for title in ("Status keys", "Status of an engine", "Status of a request")
        for key in pages.names(pages.section(PAGE, title))
    }
    # Registrations that drain show only while they do.
    assert keys_of(status) | keys_of(ended) <= described
    assert set(status["states"]) | set(ended["states"]) <= {state.value for state in State}
    assert {state.value for state in State} <= described
    assert {verdict.value for verdict in Verdict} <= described


def test_a_client_written_from_the_page_alone(tmp_path: Path) -> None:
    """Real and virtual requests, a refusal, a repeat, a new connection, a restart."""
    with (
        DaemonProcess(folder=tmp_path) as daemon,
        Peer() as peer,
        PlainClient(daemon.endpoint, "engine", "scheduler") as scheduler,
        PlainClient(daemon.endpoint, "engine", "worker") as worker,
    ):
        port = worker.register_transfer()["side_channel_port"]
        scheduler.submit("v-1", "v", [[1, 2]], 20, do_virtual=True)
        assert scheduler.outcomes(1) == {"v-1": ("done", "virtual")}

        scheduler.submit("a-1", "a", [[3]], 16, metaserver=peer.url)
        assert peer.accept()["remote_block_ids"] == [[3]]
        scheduler.submit("b-1", "a", [[4]], 16, metaserver=peer.url)
        assert scheduler.expect("refused")["requests"][0]["reason"] == "duplicate_external_id"

        scheduler.reconnect()
        scheduler.submit("a-1", "a", [[3]], 16, metaserver=peer.url)  # a repeat
        assert b"error" not in peer.ask(port, msgspec.msgpack.encode([b"get_meta_msg", "a"]))
        assert b"error" in peer.ask(port, b"nonsense")
        assert (
            peer.ask(port, msgspec.msgpack.encode([b"done_sending_msg", "a", 1, "p:1"])) == b"ACK"
        )
        assert scheduler.outcomes(1) == {"a-1": ("done", "received")}

        boot = scheduler.welcome["boot"]
        daemon.stop()
        daemon.start()
        scheduler.send("heartbeat")
        assert scheduler.expect("error")["code"] == "hello_required"
        scheduler.reconnect()
        assert scheduler.welcome["boot"] != boot
        scheduler.submit("a-1", "a", [[]], 0, do_virtual=True)
        assert scheduler.outcomes(1) == {"a-1": ("done", "virtual")}

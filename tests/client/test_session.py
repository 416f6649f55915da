"""What the session says, and when, one situation at a time."""

from __future__ import annotations

import pytest

from decoded.client import errors
from decoded.client.registration import Registration
from decoded.client.session import Phase
from decoded.client.submissions import prepare
from decoded.wire import link
from decoded.wire.layout import TransferMemory

from .conversation import Conversation
from .daemon_model import LAYOUT, MEMORY, submission


def registered(token: int, generation: int) -> link.KvRegistered:
    return link.KvRegistered(token, generation, "127.0.0.1", 20000, LAYOUT)


def submit(talk: Conversation, *request_ids: str) -> None:
    talk.session.submit(prepare([submission(one) for one in request_ids]))


def test_hello_comes_first_and_submits_wait_for_the_welcome() -> None:
    talk = Conversation()
    submit(talk, "a")
    assert [type(one) for one in talk.connect()] == [link.Hello]
    submit(talk, "b")
    assert talk.said() == []
    talk.welcome()
    assert talk.said() == [link.Submit([submission("a"), submission("b")])]
    submit(talk, "c")
    submit(talk, "d")
    assert talk.said() == [link.Submit([submission("c"), submission("d")])]


def test_session_id_is_the_same_on_each_connection() -> None:
    talk = Conversation()
    [first] = talk.connect()
    talk.pass_time(6.0)
    [second] = talk.connect()
    assert first == second


def test_heartbeats_keep_coming_and_silence_makes_it_reconnect() -> None:
    talk = Conversation()
    talk.up()
    submit(talk, "a")
    talk.said()
    for _ in range(9):
        talk.pass_time(1.0)
        assert talk.said() == [link.Heartbeat()]
    assert not talk.session.wants_connection(talk.now)
    talk.hear(link.Heartbeat())
    talk.pass_time(9.5)
    assert talk.session.phase is Phase.UP
    talk.pass_time(0.5)
    assert isinstance(talk.session.problem, errors.NoAnswer)
    assert talk.up() == [link.Submit([submission("a")])]
    assert talk.session.problem is None


def test_frames_that_wait_show_life_after_a_frozen_clock() -> None:
    talk = Conversation()
    talk.up()
    talk.now += 60.0
    talk.hear(link.Heartbeat())
    talk.session.tick(talk.now)
    assert talk.session.phase is Phase.UP


def test_old_frames_do_not_reach_a_new_connection() -> None:
    talk = Conversation()
    talk.up()
    talk.pass_time(1.0)
    talk.session._down(talk.now, errors.NoAnswer("lost"))
    assert [type(one) for one in talk.connect()] == [link.Hello]


def test_unanswered_hellos_are_repeated_with_growing_waits() -> None:
    talk = Conversation(backoff_s=0.1, max_backoff_s=1.0, welcome_s=5.0)
    waits = []
    for _ in range(7):
        talk.connect()
        talk.pass_time(5.0)
        due = talk.session.next_deadline()
        assert due is not None
        waits.append(round(due - talk.now, 6))
        talk.now = due
    assert waits == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_says_hello_again_when_the_daemon_asks_for_it() -> None:
    talk = Conversation()
    talk.up()
    submit(talk, "a")
    talk.said()
    talk.refuse_call("hello_required", "submit")
    talk.refuse_call("hello_required", "heartbeat")
    assert [type(one) for one in talk.said()] == [link.Hello]
    talk.welcome(boot="c", log="c.1")
    assert talk.said() == [link.Submit([submission("a")])]
    # A daemon that welcomes and then knows nothing does not make it run in circles.
    talk.refuse_call("hello_required", "submit")
    assert talk.said() == []
    assert talk.session.phase is Phase.WAITING


@pytest.mark.parametrize("code", ["unsupported_protocol", "world_size_mismatch", "invalid"])
def test_final_refusals_of_hello_reach_every_caller(code: str) -> None:
    talk = Conversation()
    call = talk.session.status()
    talk.connect()
    talk.refuse_call(code, "hello")
    assert isinstance(talk.session.fatal, errors.DaemonError)
    assert talk.session.fatal.code == code
    assert talk.answers() == {call: talk.session.fatal}
    with pytest.raises(errors.DaemonError, match=f"because of {code}"):
        submit(talk, "a")
    assert talk.session.next_deadline() is None


def test_a_welcome_of_another_version_is_final() -> None:
    talk = Conversation()
    talk.connect()
    talk.hear(link.Welcome(2, "9", "b", "b.1", 1.0, 10.0))
    assert isinstance(talk.session.fatal, errors.UnsupportedProtocol)


def test_a_taken_seat_is_tried_for_and_then_given_up() -> None:
    talk = Conversation(patience_s=30.0)
    begin = talk.now
    while talk.session.fatal is None:
        due = talk.session.next_deadline()
        talk.now = max(talk.now, due if due is not None and due > 0 else talk.now)
        talk.connect()
        talk.refuse_call("seat_taken", "hello")
        assert isinstance(talk.session.problem, errors.SeatTaken)
    assert 30.0 <= talk.now - begin < 35.0
    assert isinstance(talk.session.fatal, errors.SeatTaken)


def test_a_seat_that_becomes_free_is_taken() -> None:
    talk = Conversation()
    talk.connect()
    talk.refuse_call("seat_taken", "hello")
    assert not talk.session.wants_connection(talk.now)
    talk.pass_time(1.0)
    talk.up()
    assert talk.session.up
    assert talk.session.problem is None


def test_outcomes_are_acknowledged_once_they_are_taken() -> None:
    talk = Conversation(acknowledge_s=0.02)
    submit(talk, "a", "b", "c")
    talk.up()
    talk.finished(1, "a", "b")
    talk.finished(3, "c")
    assert talk.outcomes() == ["a", "b", "c"]
    assert talk.said() == []
    talk.pass_time(0.02)
    assert talk.said() == [link.Acknowledge("b.1", 3)]
    talk.pass_time(0.02)
    assert talk.said() == []


def test_nothing_is_acknowledged_that_was_not_taken() -> None:
    talk = Conversation()
    submit(talk, "a")
    talk.up()
    talk.finished(1, "a")
    talk.session.bye()
    assert talk.said() == [link.Bye()]


def test_bye_acknowledges_and_sends_what_is_queued() -> None:
    talk = Conversation()
    submit(talk, "a")
    talk.up()
    talk.finished(1, "a")
    talk.outcomes()
    submit(talk, "b")
    talk.session.bye()
    said = talk.said()
    assert said == [link.Acknowledge("b.1", 1), link.Submit([submission("b")]), link.Bye()]
    with pytest.raises(errors.ClientClosed):
        submit(talk, "c")


def test_a_request_id_comes_back_only_after_its_acknowledgement() -> None:
    talk = Conversation()
    submit(talk, "a")
    talk.up()
    talk.finished(1, "a")
    assert talk.outcomes() == ["a"]
    submit(talk, "a")
    assert talk.said() == [link.Acknowledge("b.1", 1), link.Submit([submission("a")])]
    talk.finished(1, "a")
    assert talk.outcomes() == []
    talk.finished(2, "a")
    assert talk.outcomes() == ["a"]


def test_a_gap_makes_it_ask_anew_unless_the_outcomes_are_gone() -> None:
    talk = Conversation("worker")
    talk.up()
    talk.finished(5, "a")
    assert talk.outcomes() == ["a"]
    talk.said()
    talk.finished(7, "c")
    assert talk.outcomes() == []
    assert [type(one) for one in talk.said()] == [link.Hello]
    talk.welcome()
    assert talk.said() == [link.Acknowledge("b.1", 5)]
    talk.finished(7, "c")
    assert talk.outcomes() == ["c"]


def test_a_worker_tells_a_restarted_daemon_s_repeats_from_new_requests() -> None:
    talk = Conversation("worker")
    talk.up()
    talk.finished(1, "a", "b")
    assert talk.outcomes() == ["a", "b"]
    talk.refuse_call("hello_required", "heartbeat")
    talk.welcome(boot="c", log="c.1")
    talk.finished(1, "a", "c", log="c.1")
    assert talk.outcomes() == ["c"]
    # The id is used again, and then the scheduler starts anew under the open session.
    talk.finished(3, "a", log="c.1")
    assert talk.outcomes() == ["a"]
    talk.finished(1, "a", "b", log="c.2")
    assert talk.outcomes() == ["a", "b"]


def test_the_memory_of_handed_out_ids_is_bounded() -> None:
    talk = Conversation("worker", remember=10)
    talk.up()
    for number in range(50):
        talk.finished(number + 1, f"r{number}")
    assert len(talk.outcomes()) == 50
    assert len(talk.session._reader._handed_out) == 10


def test_refusals_are_outcomes() -> None:
    talk = Conversation()
    submit(talk, "a")
    talk.up()
    talk.hear(link.Refused([link.Refusal("a", 1, "too_many_requests", "full")]))
    talk.hear(link.Refused([link.Refusal("a", 1, "too_many_requests", "full")]))
    [outcome] = talk.taken()
    assert (outcome.state, outcome.reason, outcome.external_id) == (
        "refused",
        "too_many_requests",
        "external",
    )
    assert not outcome.ok
    assert len(talk.session.pending) == 0


def test_cancels_follow_their_submits_and_are_repeated() -> None:
    talk = Conversation()
    submit(talk, "a", "b")
    talk.session.cancel("a")
    talk.session.cancel("never submitted")
    cancel = link.Cancel([link.Cancellation("a", 1)])
    submits = link.Submit([submission("a"), submission("b")])
    assert talk.up() == [submits, cancel]
    talk.session.cancel("b", attempt=2)
    assert talk.said() == []
    talk.pass_time(10.0)
    assert talk.up() == [submits, cancel]
    talk.finished(1, "a")
    talk.session.cancel("a")
    assert talk.said() == []


def test_duplicates_and_too_many_are_errors_and_leave_nothing_behind() -> None:
    talk = Conversation(max_pending=2)
    submit(talk, "a")
    with pytest.raises(errors.DuplicateSubmission, match="'a' attempt 1"):
        submit(talk, "b", "a")
    with pytest.raises(errors.DuplicateSubmission, match="twice"):
        submit(talk, "b", "b")
    with pytest.raises(errors.ClientOverloaded, match="max_pending=2"):
        submit(talk, "b", "c")
    assert talk.up() == [link.Submit([submission("a")])]


def test_large_batches_are_cut() -> None:
    many = [
        link.Submission(f"r{number}", "x", [list(range(70_000, 72_000))], 32_000)
        for number in range(500)
    ]
    talk = Conversation()
    talk.session.submit(prepare(many))
    talk.connect()
    talk.welcome()
    frames = talk.session.take_frames()
    assert len(frames) > 2
    assert max(map(len, frames)) < 2**20 + 100
    sent = [link.decode_from_client(frame) for frame in frames]
    assert [one for batch in sent for one in batch.requests] == many  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("broken", "what"),
    [
        (link.Submission("a", "x", [[1, -1]], 20), r"block_ids"),
        (link.Submission("", "x", [[1]], 20), r"request_id"),
        (link.Submission("a", "x", [[1]], 20, kv_transfer_params={"k": object()}), "object"),
        (link.Submission("a", "x", [[1]], "20"), "prompt_tokens"),  # type: ignore[arg-type]
        (link.Submission("a", "x", [[1]], 20, kv_transfer_params={"k": 2**70}), "request 'a'"),
        ({"request_id": "a"}, "request"),
    ],
)
def test_a_submission_that_the_daemon_could_not_read_is_not_sent(
    broken: link.Submission, what: str
) -> None:
    with pytest.raises(errors.InvalidSubmission, match=what):
        prepare([submission("fine"), broken])


def test_later_changes_of_a_submission_are_not_sent() -> None:
    talk = Conversation()
    one = submission("a")
    talk.session.submit(prepare([one]))
    one.block_ids[0].append(99)
    assert talk.up() == [link.Submit([submission("a")])]


def test_without_subscription_nothing_is_kept() -> None:
    talk = Conversation(subscribe=False)
    submit(talk, "a")
    assert talk.up() == [link.Submit([submission("a")])]
    assert len(talk.session.pending) == 0
    submit(talk, "b")
    talk.session.cancel("b")
    talk.session.cancel("a")
    said = talk.said()
    assert link.Cancel([link.Cancellation("a")]) in said
    assert said.index(link.Submit([submission("b")])) < said.index(
        link.Cancel([link.Cancellation("b", 1)])
    )
    talk.hear(link.Refused([link.Refusal("b", 1, "shutting_down")]))
    assert talk.outcomes() == ["b"]


def test_a_registration_survives_reconnects_and_restarts() -> None:
    talk = Conversation("worker")
    token = talk.session.register(MEMORY, 7000)
    message = link.RegisterKv(token, MEMORY, 7000)
    assert talk.up() == [message]
    talk.lose()
    assert talk.up() == [message]
    talk.hear(registered(token, 1))
    [(_, answer)] = talk.answers().items()
    assert answer == Registration(1, "127.0.0.1", 20000, LAYOUT)
    # The same daemon, the same generation: nothing to do.
    talk.lose()
    assert talk.up(generation=1) == []
    talk.lose()
    talk.connect()
    talk.welcome(generation=None)
    assert talk.said() == [message]
    talk.hear(registered(token, 2))
    # A restarted daemon, even if it counts alike.
    talk.lose()
    talk.connect()
    talk.welcome(boot="c", log="c.1", generation=2)
    assert talk.said() == [message]
    talk.hear(registered(token, 3))
    assert talk.session.registration is not None
    assert talk.session.registration.generation == 3
    assert talk.answers() == {}


def test_a_refused_registration_fails_its_call_only() -> None:
    talk = Conversation("worker")
    token = talk.session.register(MEMORY)
    talk.up()
    talk.refuse_call("bad_layout", "register_kv", token)
    error = talk.answers()[token]
    assert isinstance(error, errors.RegistrationFailed)
    assert error.code == "bad_layout"
    assert talk.session.up
    again = talk.session.register(MEMORY)
    assert talk.said() == [link.RegisterKv(again, MEMORY)]


def test_a_lost_registration_is_tried_again_and_then_reported() -> None:
    talk = Conversation("worker", patience_s=30.0)
    token = talk.session.register(MEMORY)
    talk.up()
    talk.hear(registered(token, 1))
    talk.answers()
    talk.refuse_call("hello_required", "heartbeat")
    talk.said()
    talk.welcome(boot="c", log="c.1")
    lost = talk.now
    tries = 0
    while talk.session.fatal is None:
        tries += link.RegisterKv(token, MEMORY) in talk.said()
        talk.hear(link.Heartbeat())
        talk.refuse_call("port_taken", "register_kv", token)
        assert isinstance(talk.session.problem, errors.RegistrationFailed)
        due = talk.session.next_deadline()
        if due is not None:
            talk.pass_time(due - talk.now)
    assert tries > 3
    assert 30.0 <= talk.now - lost < 35.0
    assert isinstance(talk.session.fatal, errors.RegistrationFailed)


def test_an_abandoned_registration_is_taken_back() -> None:
    talk = Conversation("worker")
    token = talk.session.register(MEMORY)
    talk.up()
    talk.session.abandon(token)
    [message] = talk.said()
    assert isinstance(message, link.UnregisterKv)
    talk.hear(registered(token, 1))
    talk.hear(link.KvUnregistered(message.token))
    assert talk.answers() == {}
    assert talk.session.registration is None
    # Abandoned while nobody was there to be told.
    token = talk.session.register(MEMORY)
    talk.said()
    talk.pass_time(10.0)
    talk.session.abandon(token)
    assert [type(one) for one in talk.up(generation=2)] == [link.UnregisterKv]


def test_what_the_worker_s_own_engine_serves_ends_with_the_daemon() -> None:
    """Producers that the earlier daemon told of it may be writing still."""
    talk = Conversation("worker")
    talk.up()
    own = TransferMemory(LAYOUT, 15000, [4096])
    token = talk.session.register(own)
    assert talk.said() == [link.RegisterKv(token, own)]
    talk.hear(registered(token, 1))
    talk.lose()
    # The same daemon has only forgotten: it still knows who was told.
    assert talk.up(generation=None) == [link.RegisterKv(token, own)]
    talk.hear(registered(token, 2))
    talk.lose()
    assert talk.up(boot="c", log="c.1") == []
    assert talk.session.registration is None
    fresh = TransferMemory(LAYOUT, 15001, [4096])
    token = talk.session.register(fresh)
    assert talk.said() == [link.RegisterKv(token, fresh)]


def test_unregistering_outlives_a_reconnect() -> None:
    talk = Conversation("worker")
    talk.up()
    token = talk.session.unregister()
    assert talk.said() == [link.UnregisterKv(token)]
    with pytest.raises(errors.ClientError, match="in flight"):
        talk.session.register(MEMORY)
    talk.pass_time(10.0)
    assert talk.up() == [link.UnregisterKv(token)]
    talk.hear(link.KvUnregistered(token))
    assert talk.answers() == {token: None}


def test_kv_memory_is_for_workers() -> None:
    with pytest.raises(errors.ClientError, match="scheduler"):
        Conversation().session.register(MEMORY)


def test_status_needs_no_welcome_and_outlives_a_reconnect() -> None:
    talk = Conversation()
    token = talk.session.status(request_id="a", limit=3)
    query = link.StatusQuery(token, None, "a", 3)
    assert talk.connect()[1:] == [query]
    talk.pass_time(5.0)
    assert talk.connect()[1:] == [query]
    talk.hear(link.StatusReport(token, {"version": "0"}))
    assert talk.answers() == {token: {"version": "0"}}


def test_an_error_about_a_call_fails_that_call() -> None:
    talk = Conversation()
    talk.up()
    token = talk.session.status()
    talk.refuse_call("invalid", "status", token)
    talk.refuse_call("invalid", "status", token + 1)
    assert isinstance(talk.answers()[token], errors.ProtocolFault)
    assert talk.session.up


def test_what_nobody_can_be_told_about_is_final() -> None:
    talk = Conversation()
    talk.up()
    talk.refuse_call("invalid", "submit")
    assert isinstance(talk.session.fatal, errors.ProtocolFault)


def test_frames_of_a_stranger_are_final_but_newer_kinds_are_not() -> None:
    talk = Conversation()
    talk.up()
    talk.session.receive(b"\x81\xa4kind\xa6newest", talk.now)
    assert talk.session.up
    talk.session.receive(b"HTTP/1.1 400", talk.now)
    assert isinstance(talk.session.fatal, errors.ProtocolFault)
    assert "the daemon sent" in str(talk.session.fatal)

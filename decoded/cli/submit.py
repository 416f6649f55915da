"""`decoded submit`: one request, from submit to its outcome."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

from . import FAILED, NO_DAEMON, OK, USAGE
from .options import add_config_arguments, config_of

if TYPE_CHECKING:
    from decoded.client import Client, Outcome, Submission

# It answered a moment before.
_CONNECT_S = 3.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Exit code: 0 done, 1 any other outcome or none in time, 2 usage, 3 no daemon answers."
    )
    parser.add_argument(
        "--virtual", action="store_true", help="finished without prefill node, proxy or KV memory"
    )
    parser.add_argument("--request-id", metavar="ID", help="internal id (default: a new one)")
    parser.add_argument(
        "--external-id", metavar="ID", help="id on the wire to producers (default: the internal id)"
    )
    parser.add_argument(
        "--engine-id",
        metavar="ID",
        help="submit as this engine's scheduler, if that seat is free (default: a new engine)",
    )
    parser.add_argument(
        "--block-ids",
        action="append",
        type=block_ids,
        metavar="IDS",
        help="blocks of one KV group, for instance 4-7,12; once per group, in order",
    )
    parser.add_argument(
        "--prompt-tokens", type=_count, default=0, metavar="N", help="tokens of the prompt"
    )
    parser.add_argument(
        "--cached-tokens", type=_count, default=0, metavar="N", help="of these, held already"
    )
    parser.add_argument("--metaserver", metavar="URL", help="the proxy that starts the prefill")
    parser.add_argument(
        "--pool",
        action="store_true",
        help="receive into the daemon's own KV memory (kv.pool), registered for this command",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="wait this long for the outcome, then give the request up (default: 600)",
    )
    parser.add_argument("--json", action="store_true", help="print the outcome as JSON")
    add_config_arguments(parser, "endpoint")


def run(args: argparse.Namespace) -> int:
    if problem := _misuse(args):
        return _complain(problem, USAGE)
    config = config_of(args)
    if config is None:
        return USAGE
    from decoded.client import Client, ClientError, InvalidSubmission
    from decoded.config import endpoint_of

    from .query import NoDaemonError, ask_status

    endpoint = endpoint_of(config, os.environ)
    engine_id = args.engine_id or f"decoded-submit-{secrets.token_hex(4)}"
    try:
        ask_status(endpoint, limit=0)
        submission = _submission(args)
        started = time.monotonic()
        with Client(endpoint, engine_id, name=f"decoded submit, pid {os.getpid()}") as client:
            _connect(client)
            if args.pool:
                outcome = _run_in_pool(endpoint, engine_id, client, submission, args.timeout)
            else:
                outcome = _run_one(client, submission, args.timeout)
    except NoDaemonError as error:
        return _complain(str(error), NO_DAEMON)
    except InvalidSubmission as error:
        return _complain(str(error), USAGE)
    except ClientError as error:
        return _complain(str(error), FAILED)
    if outcome is None:
        text = f"no outcome of {submission.request_id} within {args.timeout:g} s; gave it up"
        return _complain(text, FAILED)
    _print(outcome, time.monotonic() - started, args.json)
    return OK if outcome.ok else FAILED


def block_ids(text: str) -> list[int]:
    """`4-7,12` as [4, 5, 6, 7, 12]."""
    ids: list[int] = []
    for part in filter(None, text.split(",")):
        first, separator, last = part.partition("-")
        if not first.isdecimal() or (separator and not last.isdecimal()):
            raise argparse.ArgumentTypeError(f"'{part}' is neither a block id nor a range like 4-7")
        start, stop = int(first), int(last or first)
        if stop < start or stop - start > 1_000_000:
            raise argparse.ArgumentTypeError(f"'{part}' is no rising range of up to a million ids")
        ids += range(start, stop + 1)
    return ids


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of tokens")
    return int(text)


def _misuse(args: argparse.Namespace) -> str:
    """What is wrong with the arguments together; empty if nothing is."""
    if not 0 < args.timeout <= 86_400:
        return "--timeout is more than 0 and at most 86400 s"
    if args.virtual and (args.metaserver or args.pool):
        return "a virtual request takes neither --metaserver nor --pool"
    if not args.virtual and not args.metaserver:
        return "a real request needs --metaserver URL; --virtual makes one without prefill"
    if not args.virtual and not (args.block_ids and args.prompt_tokens):
        return "a real request needs --block-ids and --prompt-tokens"
    return ""


def _submission(args: argparse.Namespace) -> Submission:
    from decoded.client import Submission

    request_id = args.request_id or f"request-{secrets.token_hex(8)}"
    parameters: dict[str, Any] | None = None
    if not args.virtual:
        parameters = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "metaserver": args.metaserver,
        }
    return Submission(
        request_id=request_id,
        external_id=args.external_id or request_id,
        block_ids=args.block_ids or [[]],
        prompt_tokens=args.prompt_tokens,
        cached_tokens=args.cached_tokens,
        do_virtual=args.virtual or None,
        kv_transfer_params=parameters,
    )


def _connect(client: Client) -> None:
    """Raises NoDaemonError, or what the daemon says against this session."""
    from decoded.client import DaemonError, NoAnswer

    from .query import NoDaemonError

    try:
        client.wait_connected(_CONNECT_S)
    except NoAnswer as error:
        # The client keeps trying, as an engine's should; nobody waits for a command that does.
        if isinstance(client.problem, DaemonError):
            raise client.problem from None
        raise NoDaemonError(str(error)) from error


def _run_one(client: Client, submission: Submission, timeout_s: float) -> Outcome | None:
    client.submit(submission)
    return next(iter(client.wait(timeout_s)), None)


def _run_in_pool(
    endpoint: str, engine_id: str, client: Client, submission: Submission, timeout_s: float
) -> Outcome | None:
    """With a worker of this engine that has the daemon's own memory registered."""
    from decoded.client import Client
    from decoded.wire.layout import PoolMemory

    with Client(endpoint, engine_id, "worker", subscribe=False) as worker:
        worker.register_kv(PoolMemory(), timeout_s=timeout_s)
        return _run_one(client, submission, timeout_s)


def _print(outcome: Outcome, waited_s: float, as_json: bool) -> None:
    if as_json:
        import msgspec

        print(json.dumps({**msgspec.structs.asdict(outcome), "waited_s": waited_s}))
        return
    why = ": ".join(filter(None, (outcome.reason, outcome.detail)))
    print(f"{outcome.request_id} {outcome.state} ({why}) after {outcome.elapsed_s * 1000:.2f} ms")


def _complain(text: str, code: int) -> int:
    print(f"decoded submit: {text}", file=sys.stderr)
    return code

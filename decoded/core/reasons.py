"""Why a request ended, or a submit was refused: the words that machines may match on."""

from __future__ import annotations

# Outcomes.
RECEIVED = "received"
VIRTUAL = "virtual"
NOTHING_TO_FETCH = "nothing_to_fetch"
CANCELLED = "cancelled"
SENDER_FAILED = "sender_failed"
PREFILL_FAILED = "prefill_failed"
DEADLINE = "deadline"
DONE_OVERDUE = "done_overdue"
KV_NOT_REGISTERED = "kv_not_registered"
REGISTRATION_LOST = "registration_lost"
STALE_WRITERS = "stale_writers"
ENGINE_LOST = "engine_lost"
ENGINE_RESTARTED = "engine_restarted"
SHUTDOWN = "shutdown"
BAD_BLOCKS = "bad_blocks"
NO_METASERVER = "no_metaserver"
INTERNAL = "internal"

# Refusals.
UNKNOWN_ENGINE = "unknown_engine"
LIVE_DUPLICATE = "live_duplicate"
DUPLICATE_EXTERNAL_ID = "duplicate_external_id"
STALE_ATTEMPT = "stale_attempt"
TOO_MANY_REQUESTS = "too_many_requests"
TOO_MANY_UNACKNOWLEDGED = "too_many_unacknowledged"
SHUTTING_DOWN = "shutting_down"

"""What the core needs to know of the configuration."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CoreSettings:
    """Deadlines in seconds, bounds in items.

    The drain lasts `transfer_timeout_s + drain_margin_s` after the last moment at
    which a writer may have begun, so it is never shorter than the transport's own
    time-out (30 s for Mooncake unless MC_TRANSFER_TIMEOUT says otherwise).
    """

    request_deadline_s: float = 300.0
    registration_deadline_s: float = 30.0
    done_deadline_s: float = 30.0
    prefill_timeout_s: float = 300.0
    transfer_timeout_s: float = 30.0
    drain_margin_s: float = 1.0
    # A deployed producer tells its outcome at most 3 times, 1.0 s + 0.1 s apart.
    sender_retry_window_s: float = 3.5

    max_requests: int = 200_000
    max_unacknowledged: int = 200_000
    max_senders_per_rank: int = 1_024
    max_layers: int = 1_024
    max_story: int = 64
    max_tombstones: int = 10_000
    tombstone_age_s: float = 600.0

    @property
    def drain_s(self) -> float:
        """How long a drain lasts once no writer can begin any more."""
        return self.transfer_timeout_s + self.drain_margin_s

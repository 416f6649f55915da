"""What producers' senders say to the ranks of a request, counted per rank and distinct sender."""

from __future__ import annotations

from collections import Counter

from .events import LayersIn, SenderDone, SenderFailed
from .ledger import Ledger
from .request import Arrival, RankProgress, Request, SenderProgress, Verdict
from .settings import CoreSettings
from .states import State


class Senders:
    """Finds the request a message is for, and enters it in that request's progress.

    Whatever a sender says, memory is bounded: a request keeps at most
    `max_senders_per_rank` senders per rank and `max_layers` layers per sender.
    """

    def __init__(self, settings: CoreSettings, counters: Counter[str]) -> None:
        self._settings = settings
        self._counters = counters

    def addressee(
        self, ledger: Ledger, event: SenderDone | SenderFailed | LayersIn, now: float
    ) -> Request | None:
        """The live request that may take the message, or None once it is counted as stray.

        Early messages are not kept: only this daemon tells producers where to
        write, so what comes before that was meant for an earlier life.
        """
        external = event.engine_id, event.external_id
        request = ledger.by_external.get(external)
        if request is None or request.state is State.ACCEPTED:
            self._after_the_end(ledger.announced.get(external), event, now)
            return None
        if not 0 <= event.rank < request.ranks:
            self._counters["sender_stray_rank"] += 1
            return None
        return request

    def verdict(
        self, request: Request, event: SenderDone | SenderFailed, verdict: Verdict, now: float
    ) -> bool:
        """Enter DONE or FAILED. False if nothing new was said. FAILED outweighs DONE."""
        heard = self._hear(request, event, now)
        if heard is None:
            return False
        rank, sender = heard
        if sender.verdict is verdict or sender.verdict is Verdict.FAILED:
            self._counters["sender_repeated"] += 1
            return False
        if sender.verdict is Verdict.NONE:
            rank.spoken += 1
        sender.verdict = verdict
        if verdict is Verdict.FAILED:
            rank.failed += 1
        return True

    def layers(self, request: Request, event: LayersIn, now: float) -> None:
        """Enter layer progress; repeats and nonsense change nothing."""
        if event.first < 0 or event.count < 1:
            self._counters["layers_out_of_range"] += 1
            return
        if event.first + event.count > self._settings.max_layers:
            self._counters["layers_out_of_range"] += 1
            return
        heard = self._hear(request, event, now)
        if heard is None:
            return
        sender = heard[1]
        bits = ((1 << event.count) - 1) << event.first
        if sender.layers | bits == sender.layers:
            self._counters["layers_repeated"] += 1
            return
        sender.layers |= bits
        sender.arrivals.append(Arrival(now, event.first, event.count))

    def _hear(
        self, request: Request, event: SenderDone | SenderFailed | LayersIn, now: float
    ) -> tuple[RankProgress, SenderProgress] | None:
        if request.progress is None:
            request.progress = {}
        rank = request.progress.setdefault(event.rank, RankProgress())
        sender = rank.senders.get(event.sender)
        if sender is None:
            if len(rank.senders) >= self._settings.max_senders_per_rank:
                self._counters["sender_over_limit"] += 1
                return None
            sender = rank.senders[event.sender] = SenderProgress()
        # Senders of one request should agree on their number; if not, wait for the most.
        rank.expected = max(rank.expected, event.trans_count)
        sender.heard_at = now
        return rank, sender

    def _after_the_end(
        self, ended: Request | None, event: SenderDone | SenderFailed | LayersIn, now: float
    ) -> None:
        if ended is None:
            self._counters["sender_early"] += 1
            return
        self._counters["sender_late"] += 1
        # A late word still tells that this writer is gone, which a later attempt must know.
        if isinstance(event, (SenderDone, SenderFailed)) and 0 <= event.rank < ended.ranks:
            verdict = Verdict.DONE if isinstance(event, SenderDone) else Verdict.FAILED
            self.verdict(ended, event, verdict, now)

"""The naive model's lives of requests: what is going on, and what ends when."""

from __future__ import annotations

from collections import Counter

from decoded.core import CoreSettings
from decoded.core.request import RequestKey

from .record import House, Log, Summary, Use


class Lives:
    """All accepted submits in `uses`, oldest first, and those that ended in `ended`."""

    def __init__(self, settings: CoreSettings) -> None:
        self.s = settings
        self.houses: dict[str, House] = {}
        self.uses: list[Use] = []
        self.ended: list[Use] = []
        self.logs = 0
        self.shutting = False
        self.now = 0.0
        self.due: Counter[Summary] = Counter()

    def new_log(self) -> Log:
        self.logs += 1
        return Log(self.logs)

    # Looking things up, the slow way

    def live(self, engine: str | None = None) -> list[Use]:
        return [u for u in self.uses if u.live and engine in (None, u.key.engine_id)]

    def live_at(self, key: RequestKey) -> Use | None:
        return next((u for u in self.live() if u.key == key), None)

    def handed(self, key: RequestKey, attempt: int) -> Use | None:
        use = self.live_at(key)
        return use if use and use.attempt == attempt and use.handed else None

    def tombstone(self, key: RequestKey) -> Use | None:
        """The last use of the key, if it is among those that are still remembered."""
        latest: list[RequestKey] = []
        for use in reversed(self.ended):
            if self.now > use.ended_at + self.s.tombstone_age_s:
                return None
            if use.key in latest:
                continue
            latest.append(use.key)
            if len(latest) > self.s.max_tombstones:
                return None
            if use.key == key:
                return use
        return None

    def earlier(self, engine: str, external: str) -> Use | None:
        """The last announced use of the external id, if it is still remembered."""
        latest: list[tuple[str, str]] = []
        for use in reversed(self.ended):
            here = use.key.engine_id, use.external
            if not use.announced or here in latest:
                continue
            if self.now > use.ended_at + self.s.tombstone_age_s:
                return None
            latest.append(here)
            if len(latest) > self.s.max_tombstones:
                return None
            if here == (engine, external):
                return use
        return None

    def release(self, engine: str, house: House) -> None:
        for slot, users in list(house.retired.items()):
            if not any(use.live for use in users):
                del house.retired[slot]
                house.open_slots.discard(slot)
                self.due["release", engine, slot[0], slot[1]] += 1

    def forget(self, engine: str) -> None:
        house = self.houses.get(engine)
        if house and not (house.sessions or house.ranks or house.retired or self.live(engine)):
            del self.houses[engine]

    # Endings

    @property
    def drain_s(self) -> float:
        return self.s.transfer_timeout_s + self.s.drain_margin_s

    def all_of(self, engine: str, ending: str, reason: str, only: str = "") -> None:
        for use in self.live(engine):
            if only in ("", use.phase):
                self.give_up(use, ending, reason)

    def give_up(self, use: Use, ending: str, reason: str) -> None:
        if use.phase == "accepted":
            self.end(use, ending, reason)
        elif use.phase == "receiving":
            use.phase, use.ending, use.reason = "draining", ending, reason
            use.drained_from = self.now
            use.deadline = self.last_begin(use) + self.drain_s
            self.settle(use)

    def last_begin(self, use: Use) -> float:
        """The last moment at which a writer may begin."""
        if use.prefill == "running":
            return max(use.drained_from, use.started + self.s.prefill_timeout_s)
        return max(use.drained_from, use.prefill_ended_at or 0.0)

    def settle(self, use: Use) -> None:
        """End a drain when nobody can write any more."""
        if use.phase != "draining":
            return
        house = self.houses[use.key.engine_id]
        ways_in = [g for r, g in house.open_slots if r < use.ranks and g <= use.generation]
        if use.writers_gone() or not ways_in:
            self.end(use, use.ending, use.reason)

    def end(self, use: Use, phase: str, reason: str) -> None:
        use.phase, use.reason, use.ended_at = phase, reason, self.now
        self.ended.append(use)
        self.due["report", use.key, use.attempt, phase, reason] += 1
        self.due["stop", use.key, use.attempt] += 1
        engine = use.key.engine_id
        house = self.houses[engine]
        if house.log is use.log:
            house.log.outcomes.append((use.key.request_id, use.attempt, phase, reason))
            house.log.trim()
        self.release(engine, house)
        self.forget(engine)

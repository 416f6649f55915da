"""The house's rules once more, as plainly as can be: lists, scans and if-else.

`Naive.step` takes what the core takes and says what the core has to do, without
its tables, heaps, indices or counts.
"""

from __future__ import annotations

from collections import Counter

from decoded.core import events as ev

from .naive_lives import Lives
from .record import House, Summary, Use


class Naive(Lives):
    """What the core is to do."""

    def step(self, event: ev.Event, now: float) -> Counter[Summary]:
        """The effects that are due, as a multiset."""
        self.now, self.due = now, Counter()
        getattr(self, f"on_{type(event).__name__}")(event)
        return self.due

    # Sessions and registrations

    def on_SessionOpened(self, event: ev.SessionOpened) -> None:
        seat = event.seat
        house = self.houses.get(seat.engine_id)
        if house is None:
            house = self.houses[seat.engine_id] = House(event.world_size, self.new_log())
        new = house.sessions.get(seat) not in (None, event.session)
        if seat.role == "worker" and new and seat.rank in house.ranks:
            self.lose(house, seat.engine_id, seat.rank)
        anew = seat.role == "scheduler" and house.last_scheduler not in (None, event.session)
        if anew:
            house.log = self.new_log()
        house.world = event.world_size
        house.sessions[seat] = event.session
        house.subscribed.discard(seat)
        if event.subscribe:
            house.subscribed.add(seat)
        if seat.role == "scheduler":
            house.last_scheduler, house.expect = event.session, event.expect_workers
        self.readers(seat.engine_id, house)
        if anew:
            self.all_of(seat.engine_id, "cancelled", "engine_restarted")
        at = house.log.readers.get(seat)
        if at is not None and at < len(house.log.outcomes):
            self.due["resend", seat, at + 1] += 1

    def on_SessionClosed(self, event: ev.SessionClosed) -> None:
        seat = event.seat
        house = self.houses.get(seat.engine_id)
        if house is None or house.sessions.get(seat) != event.session:
            return
        del house.sessions[seat]
        house.subscribed.discard(seat)
        self.readers(seat.engine_id, house)
        if seat.role == "scheduler":
            self.all_of(seat.engine_id, "cancelled", "engine_lost")
        elif seat.rank in house.ranks:
            self.lose(house, seat.engine_id, seat.rank)
        self.forget(seat.engine_id)

    def readers(self, engine: str, house: House) -> None:
        wanted = set(house.subscribed)
        if house.expect and ev.Seat(engine, "scheduler", 0) in house.sessions:
            wanted |= {ev.Seat(engine, "worker", rank) for rank in range(house.world)}
        log, old, who = house.log, dict(house.log.readers), dict(house.log.who)
        log.readers.clear()
        log.who.clear()
        for seat in wanted:
            here = house.sessions.get(seat)
            same = here is None or who.get(seat) in (None, here)
            log.readers[seat] = old[seat] if seat in old and same else log.trimmed
            log.who[seat] = here or who.get(seat)
        log.trim()

    def on_RankRegistered(self, event: ev.RankRegistered) -> None:
        engine, rank, generation = event.engine_id, event.rank, event.generation
        house = self.houses.get(engine)
        refused: Summary = ("release", engine, rank, generation)
        if house is None or ev.Seat(engine, "worker", rank) not in house.sessions:
            self.due[refused] += 1
            return
        if house.ranks.get(rank) == generation or (rank, generation) in house.retired:
            return
        before = [g for r, g in house.seen if r == rank]
        if generation <= max([house.announced, *before]):
            self.due[refused] += 1
            return
        if rank in house.ranks:
            self.lose(house, engine, rank)
        house.ranks[rank] = generation
        house.open_slots.add((rank, generation))
        house.seen.append((rank, generation))

    def on_RankLost(self, event: ev.RankLost) -> None:
        house = self.houses.get(event.engine_id)
        if house is not None and event.rank in house.ranks:
            self.lose(house, event.engine_id, event.rank)
            self.forget(event.engine_id)

    def on_RankFenced(self, event: ev.RankFenced) -> None:
        house = self.houses.get(event.engine_id)
        if house is not None:
            house.open_slots.discard((event.rank, event.generation))
            for use in self.live(event.engine_id):
                self.settle(use)

    def lose(self, house: House, engine: str, rank: int) -> None:
        generation = house.ranks.pop(rank)
        slot = rank, generation
        house.retired[slot] = [u for u in self.live(engine) if u.announced and slot in u.slots]
        self.due["fence", engine, rank, generation] += 1
        self.all_of(engine, "failed", "registration_lost", only="receiving")
        self.release(engine, house)

    # Requests

    def on_Submit(self, event: ev.Submit) -> None:
        code = self.verdict(event)
        if code == "repeat":
            return
        if code:
            self.due["refuse", event.key, event.attempt, code] += 1
            return
        limit = self.s.request_deadline_s
        wish = limit if event.timeout_s is None else event.timeout_s
        expires = self.now + min(wish, limit)
        log = self.houses[event.key.engine_id].log
        use = Use(
            event.key,
            event.external_id,
            event.attempt,
            _content(event),
            event.virtual,
            log,
            expires,
            expires,
        )
        self.uses.append(use)
        self.hand_over(use)

    def verdict(self, event: ev.Submit) -> str:
        """Empty: accept. `repeat`: say nothing. Else the code of the refusal."""
        key = event.key
        house = self.houses.get(key.engine_id)
        if house is None:
            return "unknown_engine"
        live, log = self.live_at(key), house.log
        if live is not None:
            same = live.attempt == event.attempt and live.content == _content(event)
            return "repeat" if same and live.log is log else "live_duplicate"
        pending = [(n, told[1]) for n, told in log.kept if told[0] == key.request_id]
        newest = 0
        if pending:
            number, newest = pending[-1]
            read = log.readers.get(ev.Seat(key.engine_id, "scheduler", 0), log.trimmed)
            if newest == event.attempt and number > read:
                return "repeat"
        tombstone = self.tombstone(key)
        if tombstone is not None and tombstone.log is log:
            newest = max(newest, tombstone.attempt)
        if event.attempt < newest:
            return "stale_attempt"
        if self.shutting:
            return "shutting_down"
        if any(u.external == event.external_id for u in self.live(key.engine_id)):
            return "duplicate_external_id"
        if len(self.live()) >= self.s.max_requests:
            return "too_many_requests"
        if len(log.kept) >= self.s.max_unacknowledged:
            return "too_many_unacknowledged"
        return ""

    def hand_over(self, use: Use) -> None:
        quiet = self.quiet_at(use)
        if quiet > self.now and not use.virtual:
            use.deadline = min(quiet, use.expires)
            return
        use.handed = True
        use.deadline = use.expires
        self.due["start", use.key, use.attempt] += 1

    def quiet_at(self, use: Use) -> float:
        earlier = self.earlier(use.key.engine_id, use.external)
        last = earlier.last_word() if earlier else float("-inf")
        return last + self.s.sender_retry_window_s

    def on_Cancel(self, event: ev.Cancel) -> None:
        use = self.live_at(event.key)
        if use and event.attempt in (None, use.attempt):
            self.give_up(use, "cancelled", "cancelled")

    def on_Fulfilled(self, event: ev.Fulfilled) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted":
            self.end(use, "done", event.why)

    def on_Deferred(self, event: ev.Deferred) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted" and not use.deferred:
            use.deferred = True
            use.deadline = min(self.now + self.s.registration_deadline_s, use.expires)

    def on_Started(self, event: ev.Started) -> None:
        use = self.handed(event.key, event.attempt)
        if use is None or use.phase != "accepted":
            return
        house = self.houses[use.key.engine_id]
        here = [house.ranks.get(rank) for rank in range(event.ranks)]
        newest = max(house.ranks.values(), default=0)
        if not here or None in here or event.generation != newest:
            self.end(use, "failed", "registration_lost")
            return
        earlier = self.earlier(use.key.engine_id, use.external)
        if earlier and not (earlier.writers_gone() and self.quiet_at(use) <= self.now):
            self.end(use, "failed", "stale_writers")
            return
        use.phase, use.prefill, use.started = "receiving", "running", self.now
        use.ranks, use.generation, use.deadline = event.ranks, event.generation, use.expires
        # Producers may come by every rank: all that is registered now counts as used.
        use.slots = list(house.ranks.items())
        house.announced = event.generation

    def on_StartFailed(self, event: ev.StartFailed) -> None:
        use = self.handed(event.key, event.attempt)
        if use and use.phase == "accepted":
            self.end(use, "failed", event.reason)

    def on_PrefillEnded(self, event: ev.PrefillEnded) -> None:
        use = self.handed(event.key, event.attempt)
        if use is None or use.prefill != "running" or not event.over:
            return
        use.prefill = "ended" if event.ok or event.began else "never"
        use.prefill_ended_at = self.now
        if use.phase == "draining":
            use.deadline = min(use.deadline, self.now + self.drain_s)
            self.settle(use)
        elif event.ok:
            use.deadline = min(use.expires, self.now + self.s.done_deadline_s)
        else:
            self.give_up(use, "failed", "prefill_failed")

    # Senders

    def on_SenderDone(self, event: ev.SenderDone) -> None:
        self.spoke(event, "done")

    def on_SenderFailed(self, event: ev.SenderFailed) -> None:
        self.spoke(event, "failed")

    def on_LayersIn(self, event: ev.LayersIn) -> None:
        after = event.first + event.count
        if event.first >= 0 and event.count > 0 and after <= self.s.max_layers:
            self.spoke(event, "layers")

    def spoke(self, event: ev.SenderDone | ev.SenderFailed | ev.LayersIn, word: str) -> None:
        engine, external = event.engine_id, event.external_id
        use = next((u for u in self.live(engine) if u.external == external and u.announced), None)
        late = use is None
        if late and word != "layers":
            use = self.earlier(engine, external)
        if use is None or not 0 <= event.rank < use.ranks:
            return
        known = use.senders(event.rank)
        if event.sender not in known and len(known) >= self.s.max_senders_per_rank:
            return
        use.words.append((self.now, event.rank, event.sender, event.trans_count, word))
        if late:
            return
        if word == "failed" and use.phase == "receiving":
            self.give_up(use, "failed", "sender_failed")
        elif use.phase == "receiving" and word == "done" and use.whole():
            self.end(use, "done", "received")
        else:
            self.settle(use)

    # The rest

    def on_Acknowledged(self, event: ev.Acknowledged) -> None:
        house = self.houses.get(event.seat.engine_id)
        if house is None or event.log != house.log.number:
            return
        if event.seat not in house.log.readers:
            return
        if event.seq <= len(house.log.outcomes):
            readers = house.log.readers
            readers[event.seat] = max(readers[event.seat], event.seq)
            house.log.trim()

    def on_ShutdownBegan(self, event: ev.ShutdownBegan) -> None:
        self.shutting = True

    def on_ShutdownDue(self, event: ev.ShutdownDue) -> None:
        self.shutting = True
        for engine in list(self.houses):
            self.all_of(engine, "expired", "shutdown")

    def on_Tick(self, event: ev.Tick) -> None:
        for use in sorted(self.live(), key=lambda u: u.deadline):
            if use.deadline > self.now:
                continue
            if use.phase == "draining":
                self.end(use, use.ending, use.reason)
            elif use.phase == "accepted" and not use.handed and self.now < use.expires:
                self.hand_over(use)
            elif use.prefill == "ended":
                self.give_up(use, "expired", "done_overdue")
            elif use.phase == "accepted" and use.deferred:
                self.give_up(use, "expired", "kv_not_registered")
            else:
                self.give_up(use, "expired", "deadline")


def _content(event: ev.Submit) -> object:
    blocks = [list(group) for group in event.blocks]
    return event.external_id, blocks, event.prompt_tokens, event.cached_tokens, event.virtual

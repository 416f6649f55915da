"""Turning a request's record into its story."""

from __future__ import annotations

from .request import Request, StoryEntry


def tell(request: Request) -> list[StoryEntry]:
    """Everything that happened to `request`, in order of time, layer arrivals included."""
    began = StoryEntry(request.submitted_at, "accepted", f"attempt {request.attempt}")
    story = [began, *(StoryEntry(*entry) for entry in request.story)]
    for rank, progress in (request.progress or {}).items():
        for name, sender in progress.senders.items():
            for arrival in sender.arrivals:
                last = arrival.first + arrival.count - 1
                layers = f"layer {last}" if arrival.count == 1 else f"layers {arrival.first}-{last}"
                detail = f"rank {rank} of {name}: {layers}"
                story.append(StoryEntry(arrival.time, "layers in", detail))
    story.sort(key=lambda entry: entry.time)
    return story

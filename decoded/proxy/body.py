"""A client's body, and the bodies that D and P engines are sent for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .errors import BadRequest, TooLarge

Api = Literal["/v1/completions", "/v1/chat/completions"]

MAX_LEGS = 1024
"""Prompts times `n` of one request."""

# What asks for more than a prompt's KV, of which P has nothing to give.
_NOT_FOR_PREFILL = (
    "stream",
    "stream_options",
    "min_tokens",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "prompt_logprobs",
    "echo",
    "return_token_ids",
)


@dataclass(frozen=True)
class Part:
    """One prompt with one answer: what one D request is about.

    `prompt`: which of the client's prompts it is. `cost`: an estimate of its tokens.
    """

    body: dict[str, Any]
    prompt: int
    cost: int


def split(api: Api, body: Any) -> list[Part]:
    """A request's parts in the order of their choices. Raises BadRequest.

    Each has one prompt and `n` 1, so that each D request is about one prompt and its id need
    not be read to know which.
    """
    if not isinstance(body, dict):
        raise BadRequest("", "the body has to be a JSON object")
    if body.get("use_beam_search") or (body.get("best_of") or 1) != 1:
        raise BadRequest(
            "use_beam_search" if body.get("use_beam_search") else "best_of",
            "beams begin as other beams' answers, of which no P node has the KV; leave it out",
        )
    if not isinstance(body.get("stream") or False, bool):
        raise BadRequest("stream", "has to be true or false")
    count = body.get("n")
    count = 1 if count is None else count
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise BadRequest("n", f"{count!r:.100} is no number of answers")
    prompts = _prompts(body) if api == "/v1/completions" else [_messages(body)]
    if len(prompts) * count > MAX_LEGS:
        raise BadRequest("n", f"{len(prompts)} prompts times n={count} exceeds {MAX_LEGS}")
    return [
        Part(_one(body, prompt, number, count), index, _cost(prompt))
        for index, prompt in enumerate(prompts)
        for number in range(count)
    ]


def check_volume(body: Mapping[str, Any], parts: Sequence[Part], size: int, max_bytes: int) -> None:
    """Raises TooLarge if the parts' bodies are too much together. `size`: bytes of `body`.

    Each part carries a copy of all but the prompts.
    """
    if len(parts) * size <= max_bytes:
        return
    prompts = {part.prompt for part in parts}
    rest = {key: value for key, value in body.items() if key not in ("prompt", "messages")}
    total = len(parts) // len(prompts) * size + len(parts) * len(json.dumps(rest))
    if total > max_bytes:
        raise TooLarge(
            f"{len(parts)} requests of one prompt and one answer each, into which this one is "
            f"split, have {total} bytes, over {max_bytes}: ask for fewer at once"
        )


def _prompts(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None:
        raise BadRequest("prompt_embeds", "is not supported: send the prompt as text or tokens")
    if isinstance(prompt, str) or _is_tokens(prompt):
        return [{"prompt": prompt}]
    if isinstance(prompt, list) and prompt:
        for index, one in enumerate(prompt):
            if not (isinstance(one, str) or _is_tokens(one)):
                raise BadRequest(f"prompt[{index}]", "has to be a text or a list of token ids")
        return [{"prompt": one} for one in prompt]
    raise BadRequest("prompt", "has to be a text, a list of token ids, or a list of either")


def _is_tokens(prompt: object) -> bool:
    return (
        isinstance(prompt, list)
        and bool(prompt)
        and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)
    )


def _messages(body: Mapping[str, Any]) -> dict[str, Any]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages", "has to be a list with at least one message")
    return {"messages": messages}


def _cost(prompt: Mapping[str, Any]) -> int:
    """A rough number of tokens: they are counted where they are given, else four letters each."""
    given = prompt.get("prompt")
    if isinstance(given, list):
        return max(1, len(given))
    return max(1, len(str(given if given is not None else prompt["messages"])) // 4)


def _one(
    body: Mapping[str, Any], prompt: Mapping[str, Any], number: int, count: int
) -> dict[str, Any]:
    one = {**body, **prompt}
    if "n" in one:
        one["n"] = 1
    seed = one.get("seed")
    if count > 1 and isinstance(seed, int):
        if not -(1 << 63) <= seed < (1 << 63) - number:
            raise BadRequest("seed", f"it and the next {count - 1} have to fit into 64 bits")
        # As vLLM seeds the answers of one request.
        one["seed"] = seed + number
    return one


def check_prefill(body: Mapping[str, Any]) -> None:
    """Raises BadRequest for what a P engine could understand otherwise than D does."""
    cut = body.get("truncate_prompt_tokens")
    if isinstance(cut, int) and cut < 0:
        raise BadRequest(
            "truncate_prompt_tokens",
            "give the number of tokens to keep: what is left of the context depends on "
            "max_tokens, which is another one for the prefill",
        )


def wants_virtual(body: Mapping[str, Any]) -> bool:
    """The client itself asks for a virtual request."""
    params = body.get("kv_transfer_params")
    if params is None:
        return False
    if not isinstance(params, dict):
        raise BadRequest("kv_transfer_params", "has to be an object")
    virtual = params.get("do_virtual")
    if virtual is not None and not isinstance(virtual, bool):
        raise BadRequest("kv_transfer_params.do_virtual", "is true, false, null or absent")
    return bool(virtual)


def for_decode(body: Mapping[str, Any], metaserver: str | None) -> dict[str, Any]:
    """What D is sent. `metaserver`: where its daemon asks for the prefill; None is virtual."""
    params: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False}
    if metaserver is None:
        params["do_virtual"] = True
    else:
        params["metaserver"] = metaserver
    return {**body, "kv_transfer_params": params}


def for_prefill(body: Mapping[str, Any], posted: Mapping[str, Any]) -> dict[str, Any]:
    """What P is sent: the same prompt, for one token. `posted`: what D's daemon has posted."""
    kept = {key: value for key, value in body.items() if key not in _NOT_FOR_PREFILL}
    kept["max_tokens"] = 1
    # It comes before max_tokens where there is one; /v1/completions knows none.
    if "max_completion_tokens" in body:
        kept["max_completion_tokens"] = 1
    return {**kept, "n": 1, "stream": False, "kv_transfer_params": dict(posted)}

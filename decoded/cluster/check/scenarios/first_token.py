"""Time to the first token of a long prompt, beside one engine alone, and where it goes.

The parts come from three places: the proxy's log line of the request, the daemon's story of
it, and the P engine's log line of its push. The proxy's clock is the one that counts; the
daemon's is joined to it where its POST arrives.
"""

from __future__ import annotations

import json
import re
from typing import Any

from decoded.cluster.check.stage import Stage
from decoded.cluster.check.verdict import expect

from .scenario import Scenario

_REQUEST_ID = "first-token"
_AFTER_LAST_LAYER = re.compile(r"after_last_layer_s[^0-9]*=[^0-9]*([0-9.e-]+)")


async def first_token(stage: Stage) -> str:
    """Parts: the proxy's own time; D's admission with the daemon's POST; prefill; what P still
    had to write after its last layer; from the daemon's outcome to D's next step; and that
    step, which is taken to last as long as the one after it.
    """
    question = stage.questions.long[0]
    lines: list[str] = []
    for number in (1, 2):
        await stage.fresh()
        name = f"{_REQUEST_ID}-{number}"
        streamed = await stage.api.stream(question.ids, 4, name, ignore_eos=True)
        first_ms, step_ms = streamed.times[0] * 1000, _step_ms(streamed.times)
        parts = await _parts(stage, name, step_ms)
        told = ", ".join(f"{part} {ms:,.1f}" for part, ms in parts.items())
        lines.append(f"{first_ms:,.0f} ms ({told})")
    alone = ", ".join(f"{seconds * 1000:,.0f}" for seconds in stage.reference.first_s)
    return f"{len(question.prompt)} tokens: {'; '.join(lines)}; one engine alone {alone} ms"


async def _parts(stage: Stage, name: str, step_ms: float) -> dict[str, float]:
    line = await _proxy_line(stage, name)
    external_id = f"cmpl-{line['token']}-0"
    [report] = (await stage.cluster.status(external_id))["requests"]
    at = {entry["what"]: entry["at_s"] * 1000 for entry in report["story"]}
    expect({"receiving", "done"} <= at.keys(), f"the daemon tells only {sorted(at)} of it")
    done_ms = line["metaserver_ms"] - at["receiving"] + at["done"]
    after_ms = await _after_last_layer_ms(stage, line["token"])
    return {
        "proxy": line["decode_sent_ms"] + line["prefill_sent_ms"] - line["metaserver_ms"],
        "D and POST": line["metaserver_ms"] - line["decode_sent_ms"],
        "prefill": done_ms - after_ms - line["prefill_sent_ms"],
        "push after the last layer": after_ms,
        "report": line["first_byte_ms"] - done_ms - step_ms,
        "first step": step_ms,
    }


async def _proxy_line(stage: Stage, name: str) -> dict[str, Any]:
    """What the proxy has logged of a request, once it has."""
    found: list[dict[str, Any]] = []

    async def there() -> bool:
        lines = stage.cluster.proxy.child.words().splitlines()
        found[:] = [json.loads(line) for line in lines if f'"{name}"' in line]
        return bool(found)

    await stage.until(there, f"the proxy logs nothing of request {name}")
    return found[-1]


async def _after_last_layer_ms(stage: Stage, token: str) -> float:
    """What the P engine has logged of a push, once it has."""
    found: list[str] = []

    async def there() -> bool:
        for node in stage.running_p:
            for line in node.child.words().splitlines():
                if token in line and "push ended" in line:
                    found.extend(_AFTER_LAST_LAYER.findall(line))
        return bool(found)

    await stage.until(there, "no P engine logs the end of the push")
    return float(found[-1]) * 1000


def _step_ms(times: list[float]) -> float:
    expect(len(times) > 1, "the answer came in one piece")
    return (times[1] - times[0]) * 1000


SCENARIOS = (Scenario("first token", "time to the first token, and its parts", first_token),)

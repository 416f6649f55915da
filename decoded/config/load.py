"""From file, environment and flags to one checked `Config`, or all that is wrong at once."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from .checks import Problem
from .runtime import endpoint_of
from .schema import RULES_BROKEN, Config
from .sources import KeyPath, Sources, keys_at
from .transport import write_timeout_s


class ConfigError(ValueError):
    """The configuration is wrong. `problems`: everything that is; the text has a line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        count = "1 error" if len(problems) == 1 else f"{len(problems)} errors"
        lines = [f"the configuration has {count}:", *(f"  {problem}" for problem in problems)]
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)


def load_config(
    path: Path | None, overrides: Mapping[str, str], environ: Mapping[str, str]
) -> Config:
    """The configuration: defaults < YAML file < environment < overrides.

    `overrides`: dotted key to text, for instance `{"link.timeout_s": "5"}`. `environ`:
    usually os.environ; DECODED_LINK__TIMEOUT_S is the same key there.
    Raises ConfigError with every error at once.
    """
    sources = Sources()
    if path is not None:
        sources.add_file(path)
    sources.add_environment(environ)
    sources.add_flags(overrides)
    config, problems = _validate(sources)
    if config is not None and not problems:
        try:
            endpoint_of(config, environ)
        except ValueError as error:
            problems = [Problem("link.endpoint", str(error))]
        try:
            write_timeout_s(config, environ)
        except ValueError as error:
            problems.append(Problem("transfer.ascend", str(error)))
    if config is None or problems:
        raise ConfigError(problems)
    return config


def _validate(sources: Sources) -> tuple[Config | None, list[Problem]]:
    """Validate; then leave out what was wrong and validate the rest, to find all there is.

    A rule that joins several keys is only seen once each key is valid by itself; what it
    says about a key that was left out is not the user's mistake.
    """
    problems = list(sources.problems)
    data = sources.data
    left_out: set[str] = set()
    while True:
        try:
            return Config.model_validate(data), problems
        except ValidationError as error:
            errors = error.errors(include_url=False)
        paths = [_plain_path(details["loc"]) for details in errors]
        dropped: set[str] = set()
        for details, path in zip(errors, paths, strict=True):
            if details["type"] == RULES_BROKEN:
                problems += _rules(details, sources, left_out)
                continue
            if not _follows(path, paths, left_out):
                problems.append(_problem(details, path, sources))
            if not any(_touches(_dotted(path), out) for out in dropped):
                dropped |= _drop(data, path)
        if not dropped:
            return None, problems
        left_out |= dropped


def _follows(path: KeyPath, paths: Sequence[KeyPath], left_out: set[str]) -> bool:
    """Whether an error is there only because of others: below it, or left out already."""
    below = any(len(other) > len(path) and other[: len(path)] == path for other in paths)
    dotted = _dotted(path)
    return below or any(out == dotted or out.startswith(dotted + ".") for out in left_out)


def _rules(details: ErrorDetails, sources: Sources, left_out: set[str]) -> list[Problem]:
    """The rules that are broken by what the user said."""
    found = []
    for problem in details["ctx"]["problems"]:
        keys = (problem.path, *problem.involved)
        if any(_touches(key, out) for key in keys for out in left_out):
            continue
        said = [sources.origin(_split(key)) for key in keys]
        origin = next((where for where in said if where), "")
        found.append(Problem(problem.path, problem.text, origin, problem.involved))
    return found


def _problem(details: ErrorDetails, path: KeyPath, sources: Sources) -> Problem:
    dotted, kind = _dotted(path), details["type"]
    value = details["input"]
    if kind == "extra_forbidden":
        text = _unknown(path)
    elif kind in _TEXTS:
        text = _TEXTS[kind].format(**details.get("ctx", {}))
    else:
        text = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
        if isinstance(value, str | int | float) and "password" not in dotted:
            shown = repr(value)
            text += "" if shown in text else f", not {shown[:80]}"
        elif isinstance(value, dict | list):
            text += ", not a map" if isinstance(value, dict) else ", not a list"
    return Problem(dotted, text, sources.origin(path))


# pydantic's words speak of Python; these speak of the file.
_TEXTS = {
    "missing": "needed, but not there",
    "model_type": "should be a map of keys",
    "model_attributes_type": "should be a map of keys",
    "tuple_type": "should be a list",
    "too_short": "needs at least {min_length} in the list, there are {actual_length}",
    "too_long": "takes at most {max_length} in the list, there are {actual_length}",
}


def _unknown(path: KeyPath) -> str:
    """What to say of a key that is not there: the nearest one that is."""
    known = keys_at(path[:-1])
    near = difflib.get_close_matches(str(path[-1]), known, n=1, cutoff=0.6)
    if near:
        return f"no such key; did you mean {near[0]}?"
    return f"no such key; there is: {', '.join(known)}" if known else "no such key"


def _plain_path(loc: tuple[int | str, ...]) -> KeyPath:
    """The path without the tags that pydantic puts in for alternatives."""
    return tuple(part for part in loc if not (isinstance(part, str) and part.startswith("<")))


def _drop(data: dict[str, Any], path: KeyPath) -> set[str]:
    """Take the value at `path` out of `data`: with the nearest map around it that can go whole,
    where it is a list item or is not there. Returns the dotted path of what was taken.
    """
    for length in range(len(path), 0, -1):
        holder: Any = data
        for part in path[: length - 1]:
            try:
                holder = holder[part]
            except (KeyError, IndexError, TypeError):
                holder = None
        if isinstance(holder, dict) and path[length - 1] in holder:
            del holder[path[length - 1]]
            return {_dotted(path[:length])}
    return set()


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path))


def _touches(key: str, other: str) -> bool:
    """Whether one of two dotted paths is the other or lies below it."""
    return key == other or key.startswith(other + ".") or other.startswith(key + ".")


def _split(dotted: str) -> KeyPath:
    return tuple(int(part) if part.isdigit() else part for part in dotted.split("."))

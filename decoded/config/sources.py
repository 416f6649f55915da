"""Where values come from: a YAML file, environment variables, the command line.

Each source adds to one nested dict and notes, per path, where a value was said,
so that an error can point at it.
"""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union

import yaml
from pydantic import BaseModel

from .checks import Problem
from .schema import Config

ENV_PREFIX = "DECODED_"
# Variables with a meaning of their own, read by the command line.
ENV_CONFIG_FILE = "DECODED_CONFIG"

KeyPath = tuple[str | int, ...]


class Sources:
    """The values said so far. Later sources win; `problems` holds what could not be read."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.problems: list[Problem] = []
        self._origins: dict[KeyPath, str] = {}

    def origin(self, path: KeyPath) -> str:
        """Where the value at `path` was said, or else one in it, or around it; empty if nowhere."""
        if path in self._origins:
            return self._origins[path]
        for known, where in self._origins.items():
            if known[: len(path)] == path:
                return where
        return self.origin(path[:-1]) if len(path) > 1 else ""

    def add_file(self, path: Path) -> None:
        """Add a YAML file."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
            self.problems.append(Problem("", f"cannot read the configuration {path}: {reason}"))
            return
        loader = _Loader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return
            if not isinstance(node, yaml.MappingNode):
                self.problems.append(Problem("", f"{path}: not a map of sections"))
                return
            value = self._read(loader, node, (), str(path))
        except yaml.YAMLError as error:
            self.problems.append(Problem("", f"{path} is not valid YAML: {_brief(error)}"))
            return
        finally:
            loader.dispose()
        # A section whose keys are all commented out reads as null.
        self.data = {key: section for key, section in value.items() if section is not None}

    def add_environment(self, environ: Mapping[str, str]) -> None:
        """Add DECODED_SECTION__KEY variables.

        Other variables with the prefix are left alone (Kubernetes makes some for a
        service of that name), save for those that only lack the second underscore.
        """
        for name in sorted(environ):
            if not name.startswith(ENV_PREFIX) or name == ENV_CONFIG_FILE:
                continue
            parts = name[len(ENV_PREFIX) :].lower().split("__")
            if len(parts) > 1:
                self._set(tuple(parts), environ[name], f"environment variable {name}")
                continue
            for section, info in Config.model_fields.items():
                key = parts[0].removeprefix(section + "_")
                if key != parts[0] and key in _keys(info.annotation):
                    meant = f"{ENV_PREFIX}{section}__{key}".upper()
                    self.problems.append(Problem("", f"{name} is not read: write {meant}"))

    def add_flags(self, overrides: Mapping[str, str]) -> None:
        """Add `section.key` -> text, as given on the command line."""
        for path, text in overrides.items():
            self._set(tuple(path.split(".")), text, "command line")

    def _set(self, path: tuple[str, ...], text: str, origin: str) -> None:
        try:
            value = _parse(text, _annotation(path))
        except yaml.YAMLError as error:
            dotted = ".".join(path)
            self.problems.append(Problem(dotted, f"not valid YAML: {_brief(error)}", origin))
            return
        target = self.data
        for part in path[:-1]:
            inner = target.get(part)
            if not isinstance(inner, dict):
                inner = target[part] = {}
            target = inner
        target[path[-1]] = value
        self._origins[path] = origin
        # What was inside the replaced value is gone, and with it where it was said.
        for known in list(self._origins):
            if len(known) > len(path) and known[: len(path)] == path:
                del self._origins[known]

    def _read(self, loader: _Loader, node: yaml.Node, path: KeyPath, source: str) -> Any:
        """The value of a YAML node; notes the line of each value and finds keys said twice."""
        line = f"{source}:{node.start_mark.line + 1}"
        if path:
            self._origins[path] = line
        if isinstance(node, yaml.SequenceNode):
            return [
                self._read(loader, item, (*path, index), source)
                for index, item in enumerate(node.value)
            ]
        if not isinstance(node, yaml.MappingNode):
            return loader.construct_object(node, deep=True)
        loader.flatten_mapping(node)
        value: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            if key in value:
                where = f"{source}:{key_node.start_mark.line + 1}"
                dotted = ".".join(map(str, (*path, key)))
                self.problems.append(Problem(dotted, "said twice in the same section", where))
            inner = (*path, key)
            value[key] = self._read(loader, value_node, inner, source)
            # The line of the key, which for a map or list is not that of its value.
            self._origins[inner] = f"{source}:{key_node.start_mark.line + 1}"
        return value


class _Loader(yaml.SafeLoader):
    """SafeLoader that takes 1e9 for a number, as YAML 1.2 does; PyYAML speaks 1.1."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def _parse(text: str, annotation: Any) -> Any:
    """The value that `text` means for a key of this type."""
    types = _alternatives(annotation)
    if types and not any(_is_model(kind) or kind in (int, float) for kind in types):
        # A text: taken as it is, so that a device named 0 or a password of yes stays one.
        return None if NoneType in types and text in ("", "null") else text
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _annotation(path: tuple[str, ...]) -> Any:
    """The type of the key at `path`, None where the tree has no such key."""
    annotation: Any = Config
    for part in path:
        fields = _fields(annotation)
        if part not in fields:
            return None
        annotation = fields[part]
    return annotation


def _alternatives(annotation: Any) -> set[Any]:
    """The types that a key takes, without Annotated, unions taken apart."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _alternatives(typing.get_args(annotation)[0])
    if origin in (Union, UnionType):
        return set().union(*(_alternatives(kind) for kind in typing.get_args(annotation)))
    return set() if annotation is None or origin is tuple else {annotation}


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _fields(annotation: Any) -> dict[str, Any]:
    """The keys below a key of this type, with their types."""
    return {
        name: info.annotation
        for kind in _alternatives(annotation)
        if _is_model(kind)
        for name, info in kind.model_fields.items()
    }


def _keys(annotation: Any) -> set[str]:
    return set(_fields(annotation))


def keys_at(path: KeyPath) -> list[str]:
    """The keys that the tree knows below `path`; list indices in it are passed over."""
    annotation: Any = Config
    for part in path:
        if isinstance(part, int):
            continue
        annotation = _fields(annotation).get(part)
        if typing.get_origin(annotation) is tuple:
            annotation = typing.get_args(annotation)[0]
    return list(_fields(annotation))


def _brief(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        return f"line {error.problem_mark.line + 1}: {error.problem or error.context}"
    return " ".join(str(error).split())

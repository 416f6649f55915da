"""The configuration as JSON Schema, for editors and for checks where this package is not."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode
from pydantic_core.core_schema import CoreSchema

from .schema import Config

_TITLE = "Configuration of decoded"


class _Schema(GenerateJsonSchema):
    """Without pydantic's titles of keys ("Heartbeat S"), which say less than the keys."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def generate(self, schema: CoreSchema, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        return {"$schema": self.schema_dialect, **super().generate(schema, mode)}


def json_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a configuration file. Keys and their bounds are those of
    `config.schema`, descriptions its docstrings. Rules that join keys (`config.checks`) and the
    form of `link.endpoint` are not in it.
    """
    document = Config.model_json_schema(schema_generator=_Schema)
    document["title"] = _TITLE
    definitions = document["$defs"]
    for key, section in document["properties"].items():
        reference = section.pop("$ref")
        described = definitions[reference.rpartition("/")[2]]
        described["title"] = key
        # A section whose keys are all commented out reads as null (`config.sources`).
        section["anyOf"] = [{"$ref": reference}, {"type": "null"}]
        section["description"] = described["description"]
    return document

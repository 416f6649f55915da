"""The JSON Schema says of a file what the daemon says of it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from decoded.config import ConfigError, load_config
from decoded.config.document import json_schema

CONFIGS = Path(__file__).parents[2] / "configs"
POOL: dict[str, Any] = {
    "groups": [{"block_size": 16, "num_blocks": 8}],
    "layers": [{"name": "layers.{}", "count": 2, "tensors": [{"block_len": 512}]}],
}
FULL: dict[str, Any] = {
    "kv": {"pool": POOL},
    "metaserver": {"tls": {"ca_file": "/ca.pem"}},
    "virtual": {"delay": {"fixed_s": 0.1}},
}


@pytest.fixture(scope="module")
def validator() -> jsonschema.Draft202012Validator:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", ["cpu.yaml", "ascend.yaml"])
def test_the_published_files_are_valid(
    validator: jsonschema.Draft202012Validator, name: str
) -> None:
    document = yaml.safe_load((CONFIGS / name).read_text())
    validator.validate(document)
    # And what they have in comments.
    validator.validate({**document, **FULL})


def maps(value: Any) -> Iterator[dict[str, Any]]:
    """Every map in a document, the whole first."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            yield from maps(inner)


def test_an_unknown_key_is_rejected_wherever_it_is(
    validator: jsonschema.Draft202012Validator,
) -> None:
    whole = yaml.safe_load((CONFIGS / "cpu.yaml").read_text()) | FULL
    places = len(list(maps(whole)))
    assert places > 15
    for place in range(places):
        document = copy.deepcopy(whole)
        validator.validate(document)
        list(maps(document))[place]["colour"] = 1
        with pytest.raises(jsonschema.ValidationError):
            validator.validate(document)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"link": None},
        {"link": {"timeout_s": 5}},
        {"link": {"timeout_s": True}},
        {"link": {"timeout_s": "5"}},
        {"link": {"max_sessions": 1.5}},
        {"deadlines": {"request_s": 0}},
        {"deadlines": {"request_s": None}},
        {"log": {"level": "loud"}},
        {"transfer": {"protocol": "udp"}},
        {"kv": {"pool": {**POOL, "layers": []}}},
        {"kv": {"pool": {"groups": POOL["groups"]}}},
        {"virtual": {"delay": {"bandwidth_bytes_per_s": 1e9, "bytes_per_token": 10}}},
        {"virtual": {"delay": {"fixed_s": 0.1, "bytes_per_token": 10}}},
        {"virtual": {"delay": {}}},
    ],
    ids=json.dumps,
)
def test_it_says_what_the_daemon_says(
    validator: jsonschema.Draft202012Validator, tmp_path: Path, document: Any
) -> None:
    path = tmp_path / "decoded.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        load_config(path, {}, {})
    except ConfigError:
        assert not validator.is_valid(document)
    else:
        validator.validate(document)


def test_every_key_is_explained_and_none_has_a_made_up_title() -> None:
    schema = json_schema()
    for where in (schema, *schema["$defs"].values()):
        assert where["description"], where["title"]
        for key, described in where["properties"].items():
            text = described.get("description")
            assert text, f"{where['title']}.{key} has no docstring"
            assert "None" not in text
            assert "title" not in described
    assert schema["$defs"]["LinkConfig"]["title"] == "link"

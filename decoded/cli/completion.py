"""`decoded completion`: what makes a shell complete this command's words.

The shell runs `decoded` itself for the words (argcomplete), so they are always those of the
installed version.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import OK

# Called with keyword arguments `prefix`, `action`, `parser`, `parsed_args`.
Completer = Callable[..., list[str]]

_SHELLS = ("bash", "zsh", "fish")
_KEY = "completer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "bash: decoded completion bash > ~/.local/share/bash-completion/completions/decoded. "
        "zsh: decoded completion zsh > _decoded, in a folder of $fpath. "
        "fish: decoded completion fish > ~/.config/fish/completions/decoded.fish."
    )
    parser.add_argument("shell", choices=_SHELLS, help="which shell the script is for")


def run(args: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    # Without bash's own defaults, which are files also where a command takes none.
    options = ["-o", "nospace"]
    print(shellcode(["decoded"], shell=args.shell, complete_arguments=options))
    return OK


def complete_with(action: argparse.Action, completer: Completer) -> None:
    """Have `completer` say what may stand as the value of `action`."""
    setattr(action, _KEY, completer)


def files_or(word: str) -> Completer:
    """Files, and a word that may stand in a file's place."""

    def found(prefix: str, **_: object) -> list[str]:
        return [*([word] if word.startswith(prefix) else []), *_files(prefix)]

    return found


def complete(parser: argparse.ArgumentParser) -> None:
    """Tell the shell the words that fit, and end the process."""
    import argcomplete
    from argcomplete.completers import SuppressCompleter

    for action in _actions(parser):
        if action.type is Path and not hasattr(action, _KEY):
            complete_with(action, _files)
    argcomplete.autocomplete(
        parser,
        always_complete_options=False,
        # Nothing rather than files for what is an id, a number or a URL.
        default_completer=SuppressCompleter(),
    )


def _files(prefix: str, **_: object) -> list[str]:
    from argcomplete.completers import FilesCompleter

    found: list[str] = list(FilesCompleter()(prefix))
    return found


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Of the parser and of its commands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            commands: dict[str, Any] = action.choices
            for command in commands.values():
                yield from _actions(command)

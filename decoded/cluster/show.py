"""What is shown while a cluster starts: a live row per process, or a line per event."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


class View:
    """This one shows nothing."""

    def note(self, text: str) -> None:
        """Something worth a line has happened."""

    def expect(self, names: Sequence[str]) -> None:
        """These are starting."""

    def told(self, name: str, text: str) -> None:
        """What one of them is at."""

    def ready(self, name: str, seconds: float) -> None:
        """One of them is ready, so long after its start."""

    def close(self) -> None:
        """Nothing is starting any more."""


class PlainView(View):
    """Lines, for where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def expect(self, names: Sequence[str]) -> None:
        self.note(f"Starting {', '.join(names)}")

    def ready(self, name: str, seconds: float) -> None:
        self.note(f"{name}: ready after {seconds:.1f} s")


class LiveView(PlainView):
    """A row per process, with what it is at."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}

    def expect(self, names: Sequence[str]) -> None:
        if self._progress is None:
            self._progress = Progress(
                SpinnerColumn(finished_text="[green]✓[/]"),
                TextColumn("{task.description}"),
                TimeElapsedColumn(),
                TextColumn("[dim]{task.fields[at]}[/]"),
                console=self._console,
            )
            self._progress.start()
        for name in names:
            self._tasks[name] = self._progress.add_task(name, total=1, at="starting")

    def told(self, name: str, text: str) -> None:
        if self._progress is not None and name in self._tasks:
            self._progress.update(self._tasks[name], at=text.replace("[", "\\["))

    def ready(self, name: str, seconds: float) -> None:
        if self._progress is not None and name in self._tasks:
            self._progress.update(self._tasks[name], at="ready", completed=1)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            self._tasks.clear()


def make_view(console: Console) -> View:
    return LiveView(console) if console.is_terminal else PlainView(console)

"""A progress bar on stderr with the time that is left; rich draws it where it is installed."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[..., None]]:
    """A bar of that many steps; nothing where stderr is not a terminal.

    Yields what to call with a few words, and `advance=0` where they begin no new step.
    """
    if not sys.stderr.isatty():
        yield lambda text, advance=1: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        try:
            yield PlainBar(total)
        finally:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        return
    # Results go to stdout as they are: they may be redirected to a file.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda text, advance=1: progress.update(task, advance=advance, description=text)


class PlainBar:
    """A progress bar of characters, one line drawn over and over."""

    def __init__(self, total: int):
        self.total, self.step, self.started = total, 0, time.monotonic()

    def __call__(self, text: str, advance: int = 1) -> None:
        self.step += advance
        done = min(20, 20 * self.step // self.total)
        bar = "#" * done + "." * (20 - done)
        print(f"\r[{bar}] {text:40} {self._left()}\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Minutes and seconds, if all steps take as long as those so far."""
        if not self.step:
            return ""
        passed = time.monotonic() - self.started
        seconds = round(passed / self.step * max(0, self.total - self.step))
        return f"{seconds // 60}:{seconds % 60:02} left"

"""A progress bar on stderr with the remaining time; it uses rich if that is installed."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress_bar(total: int) -> Iterator[Callable[..., None]]:
    """Show a bar of that many steps, or nothing if stderr is not a terminal.

    Yields a function to call with a short text, and with `advance=0` if no new step begins.
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
    # Results go to stdout without decoration, because they may be redirected to a file.
    console = Console(stderr=True)
    with Progress(console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task("", total=total)
        yield lambda text, advance=1: progress.update(task, advance=advance, description=text)


class PlainBar:
    """A progress bar of plain characters that redraws one line."""

    def __init__(self, total: int):
        self.total, self.step, self.started = total, 0, time.monotonic()

    def __call__(self, text: str, advance: int = 1) -> None:
        self.step += advance
        done = min(20, 20 * self.step // self.total)
        bar = "#" * done + "." * (20 - done)
        print(f"\r[{bar}] {text:40} {self._left()}\x1b[K", end="", file=sys.stderr, flush=True)

    def _left(self) -> str:
        """Return the remaining minutes and seconds, if steps go on as fast as so far."""
        if not self.step:
            return ""
        passed = time.monotonic() - self.started
        seconds = round(passed / self.step * max(0, self.total - self.step))
        return f"{seconds // 60}:{seconds % 60:02} left"

"""Result files: errors of one line for unusable ones, and writes that are complete or not done."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # not POSIX
    fcntl = None


class BadInput(ValueError):
    """The user's input cannot be used; the message says in one line what is wrong and why."""


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises BadInput if it cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are not text
        raise BadInput(f"{path} is not valid JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step: readers, and an interrupt, find the old or the new text."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """Return the folder, and make it if it does not exist.

    Raises BadInput if it is not writable, so that this is known before the work begins.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".attn_engine.{os.getpid()}.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error
    return path


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Lock the folder, because two runs into one file would overwrite each other's results.

    Raises BadInput if another process has the lock. Where the system has no locks, none is taken.
    """
    if fcntl is None:
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        way_out = "wait for its end or choose another --output"
        raise BadInput(f"{folder} is in use by another run; {way_out}") from error
    except OSError:
        pass  # some file systems have no locks
    try:
        yield
    finally:
        os.close(lock)

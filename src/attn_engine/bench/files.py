"""Files of results: read with one clear line when they are no good, written whole or not at all."""

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
    """What the user gave cannot be used; the message says in one line what and why."""


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises BadInput where it cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are no text
        raise BadInput(f"{path} is not valid JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file: whoever reads it, or stops this process, finds the old text or the new."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8", errors="backslashreplace")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there.

    Raises BadInput where nothing can be written into it: said before the work, not after it.
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
    """Keep the folder for this process: of two runs into one file, each would lose the other's.

    Raises BadInput where another process has it. Where the system cannot lock, nothing is held.
    """
    if fcntl is None:
        yield
        return
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        way_out = "wait for its end or take another --output"
        raise BadInput(f"{folder} is in use by another run; {way_out}") from error
    except OSError:
        pass  # some file systems have no locks
    try:
        yield
    finally:
        os.close(lock)

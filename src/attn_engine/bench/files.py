"""Files of results: read with one clear line when they are no good, written whole or not at all."""

import json
import os
from pathlib import Path
from typing import Any


class BadInput(ValueError):
    """What the user gave cannot be used; the message says in one line what and why."""


def read_json(path: Path) -> Any:
    """What a JSON file holds.

    Raises BadInput where it cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # broken JSON, or bytes that are no text
        raise BadInput(f"{path} is not valid JSON: {error}") from error


def write_whole(path: Path, text: str) -> None:
    """Replace a file: whoever reads it, or stops this process, finds the old text or the new."""
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def make_folder(path: Path) -> Path:
    """The folder, made if it is not there.

    Raises BadInput where nothing can be written into it: said before the work, not after it.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".attn_engine.part"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BadInput(f"{path} cannot be written: {error.strerror}") from error
    return path

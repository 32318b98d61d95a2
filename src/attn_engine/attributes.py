"""Attributes of layers and caches that cannot be set to what the object does not follow.

They are properties whose getters are compiled: reading one runs no Python function.
"""

from collections.abc import Callable
from operator import attrgetter
from typing import Any


class Fact(property):
    """What the constructor decided, of the NamedTuple `_kind` of its object: read-only."""

    def __set_name__(self, owner: type, name: str):
        def refuse(instance: Any, value: Any) -> None:
            made = type(instance).__name__
            raise AttributeError(
                f"{name}: decided when the {made} was made, cannot be set to {value!r}; make "
                f"another {made}"
            )

        doc = f"What the constructor made of `{name}`; read-only."
        super().__init__(attrgetter(f"_kind.{name}"), refuse, doc=doc)


class Checked(property):
    """What may be set at any time, to what `check`, given name and value, lets pass."""

    def __init__(self, check: Callable[[str, Any], Any]):
        self._check = check

    def __set_name__(self, owner: type, name: str):
        check, held = self._check, f"_{name}"

        def set_checked(instance: Any, value: Any) -> None:
            setattr(instance, held, check(name, value))

        doc = f"The `{name}` of the constructor; it may be set, and is checked then."
        super().__init__(attrgetter(held), set_checked, doc=doc)

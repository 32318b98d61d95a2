"""Attributes of layers and caches that cannot be set to what the object does not follow."""

from collections.abc import Callable
from typing import Any


class ReadOnly:
    """What the constructor decided, of the NamedTuple `_kind` of its object: read-only."""

    def __set_name__(self, owner: type, name: str):
        self._name = name
        self.__doc__ = f"What the constructor made of `{name}`; read-only."

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """The constructor's, or what follows from it."""
        return self if instance is None else getattr(instance._kind, self._name)

    def __set__(self, instance: Any, value: Any):
        """Never: what is there already was made for it."""
        made = type(instance).__name__
        raise AttributeError(
            f"{self._name}: decided when the {made} was made, cannot be set to {value!r}; make "
            f"another {made}"
        )


class Validated:
    """What may be set at any time, to what `check`, given name and value, lets pass."""

    def __init__(self, check: Callable[[str, Any], Any]):
        self._check = check

    def __set_name__(self, owner: type, name: str):
        self._name = name
        self.__doc__ = f"The `{name}` of the constructor; it may be set, and is checked then."

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """What was set last."""
        return self if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Any):
        """Raises what the check does."""
        instance.__dict__[self._name] = self._check(self._name, value)

"""Read-only and validated attributes for MultiheadAttention and KVCache."""

from collections.abc import Callable
from typing import Any


class ReadOnly:
    """A read-only attribute: the field of the same name in the object's NamedTuple `_settings`."""

    def __set_name__(self, owner: type, name: str):
        self._name = name
        self.__doc__ = f"What the constructor made of `{name}`; read-only."

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the field of `_settings`, or the descriptor itself from the class."""
        return self if instance is None else getattr(instance._settings, self._name)

    def __set__(self, instance: Any, value: Any):
        """Raise AttributeError, because the object was built for the present value."""
        made = type(instance).__name__
        raise AttributeError(
            f"{self._name}: decided when the {made} was made, cannot be set to {value!r}; make "
            f"another {made}"
        )


class Validated:
    """An attribute that may be set at any time, to the value that `check(name, value)` returns."""

    def __init__(self, check: Callable[[str, Any], Any]):
        self._check = check

    def __set_name__(self, owner: type, name: str):
        self._name = name
        self.__doc__ = f"The `{name}` of the constructor; it may be set, and is checked then."

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Return the value, or the descriptor itself from the class."""
        return self if instance is None else instance.__dict__[self._name]

    def __set__(self, instance: Any, value: Any):
        """Check and store a value."""
        instance.__dict__[self._name] = self._check(self._name, value)

"""How error messages are tested: tables of calls that are refused, all of them in errors/.

A row is `name: (error, given, *phrases)`: the class of the error, what is given to the call, and
what the message says. It begins with the first phrase, contains the others and is one line.
"""

import builtins

import numpy as np
import pytest


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def refused(*tables, **by_error):
    """Parametrise a test by rows; a keyword is the error's name for rows without a class."""
    rows = [(name, *row) for table in tables for name, row in table.items()]
    for error, table in by_error.items():
        rows += [(name, getattr(builtins, error), *row) for name, row in table.items()]
    parameters = [pytest.param(error, given, words, id=name) for name, error, given, *words in rows]
    return pytest.mark.parametrize(("error", "given", "phrases"), parameters)


def refuses(error, phrases, function, *arguments, **options):
    """Check that the call raises this error with these phrases, and return the message."""
    with pytest.raises(error) as raised:
        function(*arguments, **options)
    message = str(raised.value)
    assert message.startswith(phrases[0])
    assert all(phrase in message for phrase in phrases)
    assert "\n" not in message
    return message

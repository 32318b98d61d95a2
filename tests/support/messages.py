"""What the tests of error messages share."""

import numpy as np
import pytest


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def check_message(error, phrases):
    """It begins with the first phrase and contains the others, on one line."""
    message = str(error.value)
    assert message.startswith(phrases[0])
    assert all(phrase in message for phrase in phrases)
    assert "\n" not in message


def check_broken(function, kind, arguments, options, phrase):
    """The call raises, with a message that begins like this."""
    with pytest.raises(kind) as error:
        function(*arguments, **options)
    check_message(error, [phrase])

"""A refusal is known by its code; `tests/sentences.txt` holds the sentences of all codes."""

from contextlib import contextmanager

import pytest

from scaffpd.errors import InputError


@contextmanager
def refuses(code):
    """Expect an `InputError` with this code."""
    with pytest.raises(InputError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"

"""A refusal is known by its code; its sentence may be reworded."""

from contextlib import contextmanager

import pytest

from scaffpd.errors import InputError


@contextmanager
def refuses(code):
    """Expect an `InputError` with this code."""
    with pytest.raises(InputError) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"

"""User errors, which are ValueErrors that name field, value and remedy."""

from contextlib import AbstractContextManager

import pytest


def user_error(pattern: str) -> AbstractContextManager[pytest.ExceptionInfo[ValueError]]:
    """A context that ends in a user error whose sentence holds `pattern`, a regular expression."""
    return pytest.raises(ValueError, match=pattern)

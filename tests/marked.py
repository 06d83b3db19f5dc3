"""Parameters of a test, of which the named ones are slow or long."""

from collections.abc import Iterable

import pytest


def marked(names: Iterable[str], slow: Iterable[str] = (), long: Iterable[str] = ()) -> list:
    """`names` as parameters, with the marks; a mark on a name that is none of them is an error."""
    marks = dict.fromkeys(slow, pytest.mark.slow) | dict.fromkeys(long, pytest.mark.long)
    parameters = [pytest.param(name, marks=marks.pop(name, ())) for name in names]
    if marks:
        raise ValueError(f"marks on cases that do not exist: {sorted(marks)}")
    return parameters

"""The compiled part is built before the tests, so that what they run through does not depend on their order."""

import warnings

import pytest

from treedraft.heads import native


@pytest.fixture(scope="session", autouse=True)
def _compiled_part() -> None:
    try:
        native.load()
    except native.NativeError as error:
        warnings.warn(f"tests of the compiled part are skipped: {error}", stacklevel=1)


@pytest.fixture
def compiled_part() -> None:
    """Skips a test of the compiled part where there is none."""
    if not native.loaded():
        pytest.skip("there is no compiled part here")

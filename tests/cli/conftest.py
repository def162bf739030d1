"""What tests of commands share."""

import logging
from collections.abc import Iterator

import pytest

from zero_plugin.distributed import messages


@pytest.fixture(autouse=True)
def messages_as_before() -> Iterator[None]:
    """A command that is called in this process shows messages in its way; in the next test they are as they were."""
    logger = logging.getLogger("zero_plugin")
    before = {handler: dict(vars(handler)) for handler in logger.handlers}
    level, own_level = logger.level, messages._own_level
    yield
    logger.handlers[:] = before
    for handler, attributes in before.items():
        vars(handler).clear()
        vars(handler).update(attributes)
    logger.setLevel(level)
    messages._own_level = own_level

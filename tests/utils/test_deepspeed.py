"""The active DeepSpeed configuration, as scripts query it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from zero_plugin.utils.deepspeed import get_active_deepspeed_plugin


def test_the_active_plugin() -> None:
    """The active plugin is the state's. Without DeepSpeed none is active."""
    plugin = object()
    assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=plugin)) is plugin
    with pytest.raises(ValueError, match="does not use DeepSpeed"):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugin=None))

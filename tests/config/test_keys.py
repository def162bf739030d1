"""One row for each key: the facts that derived tables rely on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import zero_plugin
from zero_plugin.config.keys import CONFIG_FILE, FLAGS, LAUNCH, TOPICS, TRAINING
from zero_plugin.config.schema import key_schema

ROWS = (*LAUNCH.values(), *TRAINING, CONFIG_FILE)


def test_no_two_rows_share_a_name_or_a_variable() -> None:
    """Each name, short field, flag and environment variable belongs to one key. A field may have its key's name."""
    assert len({row.name for row in ROWS}) == len(ROWS)
    for names in ([row.typed for row in ROWS], [row.variable for row in ROWS if row.variable]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_every_row_is_a_key_of_the_schema() -> None:
    """A training key with a row is one of DeepSpeed's. A parameter belongs to some optimizer or scheduler."""
    kinds = (None, "AdamW", "WarmupDecayLR", "OneCycle")
    assert [row.name for row in TRAINING if all(key_schema(row.path, kind) is None for kind in kinds)] == []


def test_the_flags_of_a_topic_are_numbered_without_a_gap() -> None:
    """Two flags with one number would have an undefined order."""
    places = {topic: sorted(flag.place for flag in FLAGS.values() if flag.topic == topic) for topic in TOPICS}
    assert {topic: found for topic, found in places.items() if found != list(range(1, len(found) + 1))} == {}


def test_the_name_of_a_key_is_written_in_few_files() -> None:
    """`gradient_clipping` is in its row, in public signatures and texts, and where the engine holds its value."""
    package = Path(zero_plugin.__file__).parent
    files = [
        str(file.relative_to(package)) for file in package.rglob("*.py") if "gradient_clipping" in file.read_text()
    ]
    assert len(files) <= 6, files

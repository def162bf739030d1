"""The document in one environment variable."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import run_afresh

from zero_plugin.config.document import ENVIRONMENT_VARIABLE, Document, from_environment, to_environment
from zero_plugin.config.read import document_from_mapping
from zero_plugin.config.tree import AUTO, Origin, Tree
from zero_plugin.errors import ConfigError, Problem

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.sampled_from([AUTO, "cpu", "nvme", "2", "true", "AdamW", 2e8])
)
values: st.SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)
origins = st.builds(Origin, st.sampled_from(["file", "flag", "code", "rule", "default"]), st.text(), st.text())
trees = st.builds(
    lambda nested, origin: Tree.from_nested(nested, lambda _: origin),
    st.dictionaries(st.text(), values, max_size=4),
    origins,
)
notes = st.builds(Problem, st.text(), st.text(), st.text(), st.text(), st.text(), st.sampled_from(["warning", "note"]))
documents = st.builds(
    Document,
    launch=trees,
    deepspeed=trees,
    sources=st.lists(st.text(), max_size=2).map(tuple),
    sections=st.dictionaries(st.lists(st.text(), min_size=1, max_size=3).map(tuple), st.text(), max_size=3),
    notes=st.lists(notes, max_size=2).map(tuple),
)


@given(documents)
@settings(max_examples=60, deadline=None)
def test_round_trip_is_equal(document: Document) -> None:
    """A worker reads exactly the launcher's document, origins and AUTO included, in printable ASCII."""
    text = to_environment(document)
    assert text.isascii()
    assert text.isprintable()
    assert from_environment({ENVIRONMENT_VARIABLE: text}) == document


def test_a_real_process_gets_it() -> None:
    """The text survives a real environment. Without the variable there is no document."""
    document = document_from_mapping({"gradient_clipping": "auto", "wandb": {"project": 'a "b" é\n'}}, "code")
    code = (
        "import os; from zero_plugin.config.document import from_environment as f;"
        "d = f(os.environ); print(d.deepspeed.value('gradient_clipping'), ascii(d.deepspeed.value('wandb', 'project')))"
    )
    run = run_afresh("-c", code, **{ENVIRONMENT_VARIABLE: to_environment(document)})
    assert run.stdout.strip() == r"""AUTO 'a "b" \xe9\n'""", run.stderr
    assert from_environment({}) is None


def test_a_document_too_large_for_the_system_is_refused() -> None:
    """A document beyond the limit of one environment variable is an error before any process starts."""
    document = document_from_mapping({"wandb": {"project": "x" * 140_000}}, "Accelerator(config=…)")
    with pytest.raises(ConfigError, match="bytes to hand over"):
        to_environment(document)

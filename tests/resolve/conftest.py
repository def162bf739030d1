import pytest

from zero_plugin.config.document import Document
from zero_plugin.config.resolve.facts import Facts
from zero_plugin.config.resolve.resolve import resolve
from zero_plugin.config.tree import Origin, Tree, dotted


@pytest.fixture
def document():
    """Build a document from plain training keys and launch keys. Every value's place names its path."""

    def make(training=None, launch=None, launch_kind="file"):
        return Document(
            Tree.from_nested(launch or {}, lambda path: Origin(launch_kind, f"run.yaml:{dotted(path)}")),
            Tree.from_nested(training or {}, lambda path: Origin("file", f"ds.json:{dotted(path)}")),
            ("ds.json",),
        )

    return make


@pytest.fixture
def resolved(document):
    """Resolve plain keys against the facts given as keywords."""

    def make(training=None, launch=None, launch_kind="file", **facts):
        return resolve(document(training, launch, launch_kind), Facts(**facts))

    return make

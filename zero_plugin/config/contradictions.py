"""Every contradiction of a document, topic by topic."""

from __future__ import annotations

from collections.abc import Iterator

from zero_plugin.config.document import Document
from zero_plugin.config.rules.asked import Asked
from zero_plugin.config.rules.batch import check_batch
from zero_plugin.config.rules.offload import check_offload
from zero_plugin.config.rules.optimizing import check_optimizing
from zero_plugin.config.rules.parallel import check_parallel
from zero_plugin.config.rules.precision import check_precision
from zero_plugin.config.rules.sections import check_sections
from zero_plugin.config.rules.stages import check_stages
from zero_plugin.config.rules.zenflow import check_zenflow
from zero_plugin.errors import Problem

__all__ = ["contradictions"]

_TOPICS = (
    check_precision,
    check_stages,
    check_offload,
    check_zenflow,
    check_batch,
    check_optimizing,
    check_parallel,
    check_sections,
)


def contradictions(document: Document) -> Iterator[Problem]:
    """Errors, and warnings of what has no effect. A field that is `auto`, or of a wrong type, takes part in none.

    An error is what DeepSpeed refuses, or what would train otherwise than written; checked against DeepSpeed 0.19.8.
    """
    asked = Asked(document)
    for check in _TOPICS:
        yield from check(asked)

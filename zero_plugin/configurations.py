"""What a run is asked to be: one document, or one for each DeepSpeed plugin, of which one is followed at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from zero_plugin.config.check import check_document
from zero_plugin.config.document import Document
from zero_plugin.config.find import lay_document
from zero_plugin.config.launch_settings import asks_for_deepspeed, launch_settings
from zero_plugin.deepspeed_plugin import DeepSpeedPlugin

__all__ = ["ONLY", "Configurations"]

ONLY: Final = "default"  # the name of a plugin that came without one


class Configurations:
    """The documents of a run by the names of their plugins; that of the selected plugin is followed.

    Args:
        found: what launcher and file say.
        plugins: what code says by plugins; none where it has none.
        overlay: lays the other arguments of code over a document.

    Attributes:
        plugins: a view of each document, the first one selected; none of a run without DeepSpeed.
        in_code: whether code brought the plugins.

    Raises:
        ConfigError: everything that is wrong with the documents.
    """

    def __init__(
        self,
        found: Document,
        plugins: Mapping[str, DeepSpeedPlugin],
        overlay: Callable[[Document], Document],
    ) -> None:
        documents = {name: lay_document(found, plugin.document) for name, plugin in plugins.items()} or {ONLY: found}
        self._documents = {name: _checked(overlay(document)) for name, document in documents.items()}
        self.in_code = bool(plugins)
        self.plugins = dict(plugins)
        only = self._documents.get(ONLY)
        if not plugins and only is not None and asks_for_deepspeed(only, launch_settings(only)):
            self.plugins = {ONLY: DeepSpeedPlugin()}
        for number, (name, plugin) in enumerate(self.plugins.items()):
            plugin.show(self._documents[name])
            plugin.select(_from_accelerator_state=True) if number == 0 else plugin._unselect()

    @property
    def document(self) -> Document:
        """What the next `prepare` follows."""
        return self._documents[self._selected]

    @property
    def plugin(self) -> DeepSpeedPlugin | None:
        """The view of that document; None of a run without DeepSpeed."""
        return self.plugins.get(self._selected)

    @property
    def _selected(self) -> str:
        return next((name for name, plugin in self.plugins.items() if plugin.selected), ONLY)

    def overlay(self, lay: Callable[[Document], Document]) -> None:
        """Lay further arguments of code over every document.

        Raises:
            ConfigError: they differ from what is there.
        """
        self._documents = {name: _checked(lay(document)) for name, document in self._documents.items()}

    def follow_edits(self) -> Document:
        """The selected document with what the script wrote into its plugin since it was last shown.

        Raises:
            ConfigError: that differs from an explicit value of file or flag, or cannot run.
        """
        if self.plugin is not None:
            followed = self.plugin.follow(self.document)
            if followed is not self.document:
                self._documents[self._selected] = _checked(followed)
                self.plugin.show(self.document)
        return self.document

    def show(self, filled: Mapping[str, Any]) -> None:
        """Let the selected plugin show a configuration whose open fields are filled."""
        if self.plugin is not None:
            self.plugin.show(self.document, filled)


def _checked(document: Document) -> Document:
    return replace(document, notes=check_document(document))

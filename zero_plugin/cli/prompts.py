"""Asks a person: menus with arrow keys where the terminal can draw them, else numbered lists and lines of text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zero_plugin.errors import printable

T = TypeVar("T")


def prompts_for_terminal() -> Prompts:
    """Menus where standard input and output are a terminal that can move its cursor, else numbered lists."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return Prompts()
    try:
        from prompt_toolkit.output import create_output

        create_output()
    except Exception:  # noqa: BLE001 - what a console of Windows without the support raises exists on Windows only
        return Prompts()
    return Menus()


class Prompts:
    """Asks by numbered lists and lines on standard output; the answers come from standard input, which may be a pipe.

    Each question raises KeyboardInterrupt for Ctrl-C and EOFError where no answer can come any more.
    """

    def choose(self, question: str, options: Mapping[T, str], default: T) -> T:
        """One of the keys of `options`; the values are their lines on the screen."""
        numbers = {value if isinstance(value, int) else n: value for n, value in enumerate(options, start=1)}
        by_text: dict[str, Any] = {str(value).lower(): value for value in options}
        by_text |= {str(number): value for number, value in numbers.items()}

        def parse(line: str) -> T:
            if line.lower() not in by_text:
                raise ValueError(f"Type a number: {', '.join(map(str, numbers))}.")
            chosen: T = by_text[line.lower()]
            return chosen

        print(question)
        for number, value in numbers.items():
            print(f"  {number}) {options[value]}")
        return self.read("Number", parse, next(str(number) for number, value in numbers.items() if value == default))

    def read(self, question: str, parse: Callable[[str], T], default: str = "") -> T:
        """What `parse` makes of a line; for an empty line, of `default`. Asked again with its ValueError's message."""
        while True:
            line = input(f"{_with_default(question, default)} ").strip()
            if not sys.stdin.isatty():
                print()  # no terminal has echoed the end of the answer's line
            try:
                return parse(line or default)
            except ValueError as error:
                print(printable(str(error)))

    def confirm(self, question: str, default: bool) -> bool:
        """Yes or no."""

        def parse(line: str) -> bool:
            if line.lower() not in ("y", "yes", "n", "no"):
                raise ValueError("Type yes or no.")
            return line.lower().startswith("y")

        return self.read(question, parse, "yes" if default else "no")


class Menus(Prompts):
    """Asks by menus with arrow keys, drawn by questionary."""

    def choose(self, question: str, options: Mapping[T, str], default: T) -> T:  # noqa: D102
        import questionary

        # Options that are numbers themselves, such as stages, are shown as such.
        choices = [
            questionary.Choice(f"{value}  {line}" if isinstance(value, int) else line, value=value)
            for value, line in options.items()
        ]
        answer: T = questionary.select(question, choices, default=default, instruction=" ").unsafe_ask()  # type: ignore[arg-type]
        return answer

    def read(self, question: str, parse: Callable[[str], T], default: str = "") -> T:  # noqa: D102
        import questionary

        def problem(line: str) -> bool | str:
            try:
                parse(line.strip() or default)
            except ValueError as error:
                return str(error)
            return True

        line = questionary.text(_with_default(question, default), validate=problem).unsafe_ask()
        return parse(line.strip() or default)

    def confirm(self, question: str, default: bool) -> bool:  # noqa: D102
        import questionary

        return bool(questionary.confirm(question, default=default).unsafe_ask())


def _with_default(question: str, default: str) -> str:
    return f"{question} [{default}]" if default else question

"""Questions to the user: menus with arrow keys if the terminal can draw them, otherwise numbered lists and text."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from zero_plugin.errors import printable

T = TypeVar("T")


def prompts_for_terminal() -> Prompts:
    """Return menus if standard input and output are a terminal that can move its cursor, otherwise numbered lists."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return Prompts()
    try:
        from prompt_toolkit.output import create_output

        create_output()
    except Exception:  # noqa: BLE001 - the error class of an unsupported Windows console exists on Windows only
        return Prompts()
    return Menus()


class Prompts:
    """Questions as numbered lists and lines on standard output. Answers come from standard input, possibly a pipe.

    Each question raises KeyboardInterrupt for Ctrl-C and EOFError at the end of the input.
    """

    def choose(self, question: str, options: Mapping[T, str], default: T) -> T:
        """Ask for one of the keys of `options`. The values are their lines on the screen."""
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
        """Ask for a line and return it parsed; empty means `default`. Ask again if `parse` raises ValueError."""
        while True:
            line = input(f"{_with_default(question, default)} ").strip()
            if not sys.stdin.isatty():
                print()  # without a terminal, no line end of the answer is echoed
            try:
                return parse(line or default)
            except ValueError as error:
                print(printable(str(error)))

    def confirm(self, question: str, default: bool) -> bool:
        """Ask for yes or no."""

        def parse(line: str) -> bool:
            if line.lower() not in ("y", "yes", "n", "no"):
                raise ValueError("Type yes or no.")
            return line.lower().startswith("y")

        return self.read(question, parse, "yes" if default else "no")


class Menus(Prompts):
    """Questions as menus with arrow keys, drawn by questionary."""

    def choose(self, question: str, options: Mapping[T, str], default: T) -> T:  # noqa: D102
        import questionary

        # Options that are numbers themselves, such as stages, show their number.
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

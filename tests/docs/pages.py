"""The blocks of README and docs in order, and the kind of each, as a reader types them."""

from __future__ import annotations

import re
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n`]*)\n(?P<text>.*?)^ *```$", re.MULTILINE | re.DOTALL
)
_FILE_NAME = re.compile(r"`([\w./-]+\.(?:py|yaml|yml|json|sh))`")
_ENDINGS = {"python": (".py",), "yaml": (".yaml", ".yml"), "json": (".json",), "bash": (".sh",), "sh": (".sh",)}


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        page: path relative to the repository.
        line: number of its first line.
        language: language of the fence, "" without one.
        text: the text between the fences, without their indentation.
        file: the name under which a reader saves the block, or None. The fence's title, or the last name in the
            preceding paragraph if that ends with a colon.
    """

    page: str
    line: int
    language: str
    text: str
    file: str | None

    @property
    def first(self) -> str:
        """The first line, which names the block in the tables."""
        return self.text.strip().partition("\n")[0].strip()

    @property
    def types(self) -> bool:
        """Whether the block holds shell commands and is not a file."""
        return self.language in ("", "bash", "sh", "console") and not self.file


def blocks_of(page: Path) -> list[Block]:
    """Return all blocks of a page, from top to bottom."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            page=str(page.relative_to(ROOT)),
            line=text.count("\n", 0, match.start("text")) + 1,
            language=match["language"],
            text=textwrap.dedent(match["text"]),
            file=_file_name(match["language"], match["rest"], text[: match.start()]),
        )
        for match in _FENCE.finditer(text)
    ]


def _file_name(language: str, rest: str, before: str) -> str | None:
    if titled := re.search(r'title="([^"]+)"', rest):
        return titled[1]
    paragraph = before.rstrip().rpartition("\n\n")[2]
    names = [name for name in _FILE_NAME.findall(paragraph) if name.endswith(_ENDINGS.get(language, ()))]
    return names[-1] if names and paragraph.endswith(":") else None


def commands_of(block: Block) -> list[tuple[str, str]]:
    """Yield each command of a block as typed, with the output that the block shows.

    If lines begin with `$ `, these are the commands, and the lines below them are the output.
    """
    prompted = any(line.startswith("$ ") for line in block.text.splitlines())
    found: list[list[str]] = []
    unfinished = False
    for line in block.text.splitlines():
        if unfinished:
            found[-1][0] += f"\n{line}"
        elif prompted and not line.startswith("$ "):
            found[-1][1] += f"{line}\n"
            continue
        else:
            found.append([line.removeprefix("$ "), ""])
        unfinished = not _is_complete(found[-1][0])
    return [(command, output) for command, output in found if command.strip() and not command.lstrip().startswith("#")]


def _is_complete(command: str) -> bool:
    read = subprocess.run(["bash", "-n", "-c", command], capture_output=True, timeout=60)
    return read.returncode == 0 and not command.endswith("\\")


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of `shown` that are not printed, in order.

    Numbers may differ, `…` matches anything, all spaces are equal, and a printed line may be longer.
    """
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    missing = []
    for line in (" ".join(line.split()) for line in shown.splitlines()):
        if line in ("", "…"):
            continue
        pattern = re.compile(re.sub(r"\d+", r"\\d+", re.escape(line)).replace("…", ".*"))
        place = next((number for number, text in enumerate(rest) if pattern.search(text)), None)
        if place is None:
            missing.append(line)
        else:
            rest = rest[place + 1 :]
    return missing

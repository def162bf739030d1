"""README and docs as a reader types them: their blocks, in order, and what each one is."""

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
        page: relative to the repository.
        line: number of its first line.
        language: of the fence, "" without one.
        text: what is between the fences, without their indentation.
        file: the name under which a reader saves it, or None. The title of the fence, or the last name in the
            paragraph before, where that ends with a colon.
    """

    page: str
    line: int
    language: str
    text: str
    file: str | None

    @property
    def first(self) -> str:
        """The first line, by which the tables name the block."""
        return self.text.strip().partition("\n")[0].strip()

    @property
    def types(self) -> bool:
        """Whether it has commands for a shell, and is no file."""
        return self.language in ("", "bash", "sh", "console") and not self.file


def blocks_of(page: Path) -> list[Block]:
    """All blocks of a page, from top to bottom."""
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
    """Each command of a block as it is typed, and what the block itself shows of its output.

    Where lines begin with `$ `, these are typed, and those below them are the output.
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
    """The lines of `shown` that are not printed, in their order.

    Numbers may differ, `…` stands for anything, and spaces are as good as others; a printed line may say more.
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

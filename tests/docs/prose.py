"""Find hard English in a file or folder: `python tests/docs/prose.py [--long] PATH…`.

The rules are those that a program can check. They are no substitute for reading.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LONGEST_SENTENCE = 35  # words
LISTED_SENTENCE = 25
LONGEST_PARAGRAPH = 90

# Words that sound like a translation, and what to write instead.
WORDS = {
    r"beside": "next to, in addition to",
    r"anew": "again, from scratch",
    r"nobody": "no user, no code, or the name",
    r"by (?:itself|himself|themselves)": "alone, automatically",
    r"but for": "except",
    r"in place of": "instead of",
    r"so that": "so, to",
    r"as if": "as though, like",
    r"in vain": "without success",
    r"goes? on": "continues",
    r"comes? to": "reaches",
    r"stands? in": "is in",
    r"at once": "immediately, together",
    r"such an?": "this",
    r"(?<!thing )else": "otherwise",
}
_WORD = {re.compile(rf"\b{pattern}\b", re.IGNORECASE): instead for pattern, instead in WORDS.items()}
_BAD_START = re.compile(r"(?:What|Where|Who|By|Of|How|Which)\b")
_CODE = re.compile(r"``.*?``|`[^`]*`")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])[\"')]*\s+")
_SECTION = re.compile(r"(?:Args|Raises|Returns|Yields|Attributes|Example\w*|Note|Notes|Usage):?$")


class Text(NamedTuple):
    """A piece of prose: its line, its kind, and its words."""

    line: int
    kind: str  # docstring, comment, message, paragraph
    text: str


class Finding(NamedTuple):
    """A passage that a rule does not allow."""

    file: Path
    line: int
    rule: str
    passage: str


def find_in(file: Path, *, listed: bool = False) -> Iterator[Finding]:
    """Find what the rules do not allow in a Python or Markdown file.

    Args:
        file: the file to read.
        listed: whether to list sentences that are long but allowed.
    """
    source = file.read_text(encoding="utf-8")
    texts = _python(source) if file.suffix == ".py" else _markdown(source)
    for line, kind, text in texts:
        plain = _CODE.sub("code", text)
        if kind.startswith("docstring") and _BAD_START.match(plain):
            yield Finding(file, line, "begin with a verb or a noun", text.split("\n")[0])
        for pattern, instead in _WORD.items():
            for match in pattern.finditer(plain):
                around = plain[max(0, match.start() - 30) : match.end() + 30].replace("\n", " ")
                yield Finding(file, line, f"{match[0].lower()} → {instead}", around)
        for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[*\-]|\d+\.) )", plain):
            words = paragraph.split()
            if len(words) > LONGEST_PARAGRAPH and kind != "message":
                yield Finding(file, line, f"paragraph of {len(words)} words", " ".join(words[:12]))
            for sentence in _SENTENCE_END.split(" ".join(words)):
                count = len(sentence.split())
                if count > LONGEST_SENTENCE or (listed and count > LISTED_SENTENCE):
                    yield Finding(file, line, f"sentence of {count} words", sentence[:100])


def _python(source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if (docstring := ast.get_docstring(node)) is not None:
            docstrings.add(id(node.body[0].value))  # type: ignore[attr-defined]
            decorators = {getattr(d, "attr", getattr(d, "id", "")) for d in getattr(node, "decorator_list", ())}
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            is_call = is_function and not decorators & {"property", "cached_property", "setter"}
            prose = "\n\n".join(_blocks_of(docstring))
            yield Text(node.body[0].lineno, "docstring of a function" if is_call else "docstring", prose)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(v.value) if isinstance(v, ast.Constant) else "x" for v in node.values]
            docstrings |= {id(v) for v in node.values}
            yield from _message(node.lineno, "".join(parts))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from _message(node.lineno, node.value)
    block: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"#\s*(?:type:|noqa|!|----)", token.string):
            if block and token.start[0] != last + 1:
                yield Text(begin, "comment", " ".join(block))
                block = []
            begin = begin if block else token.start[0]
            block.append(re.sub(r"\s*#\s*(?:type:|noqa).*", "", token.string[1:]).strip())
            last = token.start[0]
    if block:
        yield Text(begin, "comment", " ".join(block))


def _blocks_of(docstring: str) -> Iterator[str]:
    """Paragraphs and items of a docstring, without code and headings of sections."""
    for block in re.split(r"\n\s*\n", docstring):
        if block.startswith("    "):  # code
            continue
        items: list[str] = []
        for line in block.split("\n"):
            if _SECTION.match(line.strip()):
                continue
            begins = re.match(r"\s{4}[*\w`, ]+(?: \(.*?\))?: ", line) or re.match(r"\s*[*|] ", line)
            if begins or not items:
                items.append(line)
            else:
                items[-1] += "\n" + line
        yield from items


def _message(line: int, text: str) -> Iterator[Text]:
    if text.count(" ") >= 4 and not re.search(r"[{}();=]\s*\n", text):  # no names, no code
        yield Text(line, "message", text.replace("\n", "\n\n"))


def _markdown(source: str) -> Iterator[Text]:
    source = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), source, flags=re.M | re.S)
    source = re.sub(r"<!--.*?-->", lambda block: "\n" * block[0].count("\n"), source, flags=re.S)
    line = 1
    for block in re.split(r"(\n\s*\n)", source):
        if block.strip() and not block.startswith(("    ", "<", "#")):
            if block.lstrip().startswith("|"):
                for number, row in enumerate(block.strip("\n").split("\n")):
                    for cell in row.strip("|").split("|"):
                        yield Text(line + number, "cell", cell.strip())
            else:
                yield Text(line, "paragraph", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", block.strip("\n")))
        line += block.count("\n")


def files_below(path: Path) -> list[Path]:
    """Return the Python and Markdown files of a folder, or the file itself."""
    if path.is_file():
        return [path]
    return sorted(file for kind in ("*.py", "*.md") for file in path.rglob(kind))


def main(arguments: list[str]) -> int:
    """Print the findings in files and folders."""
    listed = "--long" in arguments
    found = [
        finding
        for path in arguments
        if path != "--long"
        for file in files_below(Path(path))
        for finding in find_in(file, listed=listed)
    ]
    for file, line, rule, passage in found:
        print(f"{file}:{line}: {rule}: {passage}")
    print(f"{len(found)} found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

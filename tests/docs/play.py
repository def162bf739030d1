"""Type a page from top to bottom, like a reader, in an empty folder: play.py STORE RANK WORLD PAGE FOLDER FORM.

FORM is `daily` or `campaign`. Python blocks run in this process, one after the other, with shared variables. Commands
run in a shell.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from forked import ALONE, FORKS
from pages import PAGES, ROOT, Block, blocks_of, commands_of, missing_lines
from tables import (
    BEFORE,
    CAMPAIGN,
    CANNOT_RUN,
    COMPARED_ELSEWHERE,
    ENDLESS,
    EXIT_CODES,
    SECOND_MACHINE,
    SHORTER,
    find_row,
    has_row,
)

# The environment variables that locate Python, this package and the compiler. A new reader has no others of ours.
_KEPT = ("PATH", "PYTHONPATH", "TORCH_EXTENSIONS_DIR", "CXX", "OMP_NUM_THREADS", FORKS)
_RUNS = re.compile(r"\bpython \w+\.py\b")  # a script on its own: a fork, see forked.py


class Reader:
    """A reader who types the blocks of one page.

    Args:
        page: its path.
        folder: an empty folder.
        form: `daily` or `campaign`.
    """

    def __init__(self, page: Path, folder: Path, form: str) -> None:
        self._page, self._form = page, form
        self._work = folder / "work"
        self._state = folder / "state"  # of the shell: variables and the folder
        for made in (self._work, folder / "home"):
            made.mkdir()
        self._state.touch()
        self._environment = {name: os.environ[name] for name in _KEPT if name in os.environ}
        if page.name == "README.md":  # the first page's commands are new processes, like a user's
            self._environment.pop(FORKS, None)
        path = f"{Path(__file__).parent / 'bin'}:{self._environment['PATH']}"  # with a fake srun, and two machines
        self._environment |= {"PATH": path, "HOME": str(folder / "home"), "LC_ALL": "C.UTF-8"}
        self._variables: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""
        os.environ.clear()
        os.environ.update(self._environment, DS_ACCELERATOR="cpu")
        os.chdir(self._work)

    def read(self) -> None:
        """Do what the page shows. The first block that behaves differently ends it with an error."""
        if self._page != PAGES[0]:  # readers of other pages come from README and have its files
            for block in blocks_of(PAGES[0]):
                self._save(block)
        for block in blocks_of(self._page):
            if find_row({**CANNOT_RUN, **COMPARED_ELSEWHERE}, block.page, block.first, None):
                continue
            try:
                if given := find_row(BEFORE, block.page, block.first, ""):
                    exec(compile(given, f"tables.py, before {block.page}:{block.line}", "exec"), self._variables)
                self._type(block)
            except BaseException:
                print(f"{block.page}:{block.line} does not do as printed; output so far:\n{self._printed}")
                raise

    def _type(self, block: Block) -> None:
        if block.file:
            self._save(block)
        elif block.language == "python":
            self._execute("\n" * (block.line - 1) + block.text, str(ROOT / block.page))
        elif block.types:
            self._printed = ""
            for command, shown in commands_of(block):
                if (printed := self._command(block.page, command)) is None:
                    continue
                assert not (missing := missing_lines(shown, printed)), f"{command}: not printed: {missing}"
                self._printed += printed
        elif block.language == "text":
            self._compare(block)

    def _save(self, block: Block) -> None:
        if block.file:
            file = self._work / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")

    def _execute(self, code: str, name: str) -> None:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, name, "exec"), self._variables)
        self._printed = printed.getvalue()

    def _command(self, page: str, command: str) -> str | None:
        """Type a command in the shell left by earlier commands. Return both streams; None if not typed."""
        typed = command.partition("  #")[0] + find_row(SHORTER, page, command, "")
        if self._form == "daily" and has_row(CAMPAIGN, page, command):
            if not (typed := _dry(typed)):
                return None
        elif has_row(ENDLESS, page, command):
            return self._interrupted(typed)
        elif replaced := find_row(SECOND_MACHINE, page, command, None):
            typed = shlex.join(["on-two-machines", typed, typed.replace(*replaced)])
        keep = f'{{ export -p; printf "cd %q\\n" "$PWD"; }} > {self._state}'
        forks = "" if FORKS not in self._environment or not _RUNS.search(typed) else f"export {ALONE}=${FORKS}"
        done = self._shell(f". {self._state}\n{forks}\n{typed}\ncode=$?\nunset {ALONE}\n{keep}\nexit $code")
        wanted = find_row(EXIT_CODES, page, command, 0)
        assert done.returncode == wanted, f"{typed}: exit code {done.returncode}, not {wanted}\n{done.stdout}"
        return done.stdout

    def _interrupted(self, typed: str) -> str:
        """Type a command that runs until it is interrupted, and interrupt it after some seconds."""
        done = self._shell(f"timeout --signal INT 10 {typed}")
        assert done.returncode == 124, f"{typed}: exit code {done.returncode}\n{done.stdout}"
        return ""

    def _shell(self, script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self._work,
            env=self._environment,
            input="\n" * 100,  # Enter, to any question
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _compare(self, block: Block) -> None:
        """Compare the last output, or a folder's listing, with the page."""
        if not block.first.endswith("/"):
            assert not (missing := missing_lines(block.text, self._printed)), f"not printed: {missing}"
            return
        (folder,) = self._work.rglob(block.first.rstrip("/"))
        names = [line.split()[0] for line in block.text.splitlines()[1:] if line[:2] == "  " and line[2] != " "]
        assert not (absent := [name for name in names if not (folder / name).exists()]), f"not in {folder}: {absent}"


def _dry(command: str) -> str:
    """Return the command with the launcher's `--dry_run`, or "" if it starts nothing."""
    dry, found = re.subn(r"zero-plugin (launch|demo|test)\b", r"\g<0> --dry_run", command, count=1)
    return dry if found else ""


if __name__ == "__main__":
    Reader(ROOT / sys.argv[4], Path(sys.argv[5]), sys.argv[6]).read()
    from zero_plugin.state import PartialState

    if PartialState._shared_state:
        PartialState().destroy_process_group()

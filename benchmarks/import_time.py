"""Measure how long `import zero_plugin` takes beyond starting Python, and whether it imports torch.

Each import runs in a new process. Rounds alternate between a Python that imports nothing, `import zero_plugin`, `import
torch` and, if installed, `import accelerate`; the numbers are medians over the rounds.

    python benchmarks/import_time.py --pairs 15
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from functools import partial

from pairs import WIDTH, describe_run, installed, take_turns
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

BARE = "nothing"


def start_python(code: str, folder: str) -> str:
    """Run `code` in a new Python and return its standard output."""
    return subprocess.run([sys.executable, "-c", code], cwd=folder, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=15, help="rounds (default 15)")
    arguments = parser.parse_args()
    console = Console(width=WIDTH)
    description = describe_run("zero-plugin", "torch", "accelerate")

    packages = ["zero_plugin", "torch"]
    if installed("accelerate"):
        packages.append("accelerate")
    else:
        console.print("accelerate is not installed: pip install accelerate")
    with tempfile.TemporaryDirectory() as folder:
        code = {BARE: "pass"} | {name: f"import {name}" for name in packages}
        contenders = {name: partial(start_python, line, folder) for name, line in code.items()}
        timings = take_turns(contenders, arguments.pairs)
        has_torch = {
            name: start_python(f"import sys\n{line}\nprint('torch' in sys.modules)", folder).strip() == "True"
            for name, line in code.items()
        }

    table = Table(title="import, seconds", caption=description, caption_justify="left", box=MARKDOWN)
    for column in ("imports", "process", "beyond bare Python", "torch imported", "target"):
        table.add_column(column, justify="left" if column == "imports" else "right")
    for name in code:
        table.add_row(
            name,
            f"{timings.seconds(name):.3f}",
            "" if name == BARE else f"{timings.extra(name, BARE):.3f}",
            "yes" if has_torch[name] else "no",
            "< 0.1, no torch" if name == "zero_plugin" else "",
        )
    console.print(table)


if __name__ == "__main__":
    main()

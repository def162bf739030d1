"""Prints what the package's structure costs a reader: files, lines, imports, and the files that each walk enters.

Nothing here is a limit; the numbers are compared by people. `--walks` also trains, saves, loads and launches, for which
DeepSpeed's CPU build is used.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import os
import subprocess
import sys
import tempfile
import tokenize
from collections import Counter
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zero_plugin"


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code: no docstring, no comment alone, no blank."""
    lines: set[int] = set()
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in silent:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.difference_update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def import_lines(text: str) -> set[int]:
    """Numbers of the lines that import, or list `__all__`."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        listing = isinstance(node, ast.Assign) and any(
            getattr(target, "id", "") == "__all__" for target in node.targets
        )
        if listing or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def cyclic_packages(graph: grimp.ImportGraph) -> list[set[str]]:
    """Groups of packages and top-level modules that import each other in a circle, late imports counted."""

    def room(module: str) -> str:
        parts = module.split(".")
        return parts[1] if len(parts) > 1 else parts[0]

    arrows: dict[str, set[str]] = {}
    for module in graph.modules:
        for target in graph.find_modules_directly_imported_by(module):
            if room(module) != room(target):
                arrows.setdefault(room(module), set()).add(room(target))

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            for target in arrows.get(waiting.pop(), ()):
                if target not in seen:
                    seen.add(target)
                    waiting.append(target)
        return seen

    reach = {name: reached(name) for name in arrows}
    groups: list[set[str]] = []
    for name in arrows:
        group = {other for other in reach[name] if name in reach.get(other, ())}
        if group and group not in groups:
            groups.append(group)
    return groups


def print_structure() -> None:
    """The rows that need no run."""
    texts = {file: file.read_text() for file in sorted(PACKAGE.rglob("*.py"))}
    code = {file: code_lines(text) for file, text in texts.items()}
    total = sum(map(len, code.values()))
    imports = sum(len(import_lines(text) & code[file]) for file, text in texts.items())
    functions = [
        (
            len(code[file].intersection(range(node.lineno, (node.end_lineno or node.lineno) + 1))),
            f"{file.relative_to(ROOT)}:{node.lineno} {node.name}",
        )
        for file, text in texts.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    long_files = [(len(lines), str(file.relative_to(ROOT))) for file, lines in code.items()]
    names = Counter(file.name for file in texts if file.name != "__init__.py")
    graph = grimp.build_graph("zero_plugin", include_external_packages=False)
    print(f"files                              {len(texts)}")
    print(f"code lines                         {total}, {total / len(texts):.0f} per file")
    print(f"modules at the top level           {sum(f.parent == PACKAGE for f in texts)}")
    print(f"share of imports and __all__       {imports / total:.1%}")
    print(f"file names used more than once     {sum(n > 1 for n in names.values())}")
    print(f"files above 500 code lines         {[row for row in sorted(long_files, reverse=True) if row[0] > 500]}")
    print(f"functions above 60 code lines      {[row for row in sorted(functions, reverse=True) if row[0] > 60]}")
    for group in cyclic_packages(graph):
        print(f"packages in one import cycle       {len(group)}: {', '.join(sorted(group))}")
    rooms = Counter[str]()
    for file, lines in code.items():
        parts = file.relative_to(PACKAGE).parts
        rooms[parts[0] if len(parts) > 1 else "(top level)"] += len(lines)
    print("code lines by room                 " + ", ".join(f"{room} {lines}" for room, lines in rooms.most_common()))


_WALK = """
import json, os, sys, threading
entered = set()
def note(frame, event, argument):
    if event == "call":
        entered.add(frame.f_code.co_filename)
def walk(name, function, *arguments):
    entered.clear()
    threading.setprofile(note); sys.setprofile(note)
    try:
        return function(*arguments)
    finally:
        sys.setprofile(None); threading.setprofile(None)
        ours = sorted(file for file in entered if "/zero_plugin/" in file)
        print("WALK", json.dumps([name, ours]), flush=True)
import torch
from zero_plugin import Accelerator
setting, folder = json.loads(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
accelerator = Accelerator(config=setting)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=4)
model, optimizer, data = walk("prepare", accelerator.prepare, model, optimizer, data)
def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
for i, (x, y) in enumerate(data):
    walk("step", step, x, y) if i == 8 else step(x, y)
walk("save_state", accelerator.save_state, folder)
walk("load_state", accelerator.load_state, folder)
accelerator.end_training()
"""

_WALKS = {
    "one device": {"distributed_type": "NO", "use_cpu": True},
    "DDP": {"distributed_type": "MULTI_CPU", "use_cpu": True},
    "ZeRO-2": {
        "distributed_type": "DEEPSPEED",
        "use_cpu": True,
        "deepspeed_config": {"zero_optimization": {"stage": 2}},
    },
    "stage: auto": {
        "distributed_type": "DEEPSPEED",
        "use_cpu": True,
        "deepspeed_config": {"zero_optimization": {"stage": "auto"}},
    },
}


def print_walks(files: bool) -> None:
    """How many of the package's files each walk enters, the first eight steps not counted."""
    for name, setting in _WALKS.items():
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, "walk.py")
            script.write_text(_WALK)
            done = subprocess.run(
                [sys.executable, str(script), json.dumps(setting), str(Path(folder, "saved"))],
                env={**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                cwd=folder,
            )
        walks = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("WALK ")]
        if done.returncode:
            print(done.stderr[-2000:])
        print(f"{name:16} files entered: " + ", ".join(f"{walk} {len(found)}" for walk, found in walks))
        if files:
            for walk, found in walks:
                print(f"  {walk}: " + " ".join(str(Path(file).relative_to(PACKAGE)) for file in found))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", action="store_true", help="also run a step, a save, a load")
    parser.add_argument("--files", action="store_true", help="name the files of each walk")
    asked = parser.parse_args()
    print_structure()
    if asked.walks:
        print_walks(asked.files)


if __name__ == "__main__":
    main()

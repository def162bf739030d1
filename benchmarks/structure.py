"""Print what the package's structure costs a reader: files, lines, imports, and the calls of each walk.

These numbers have no limits; people compare them. `--walks` also trains, saves and loads, on one process and two, with
DeepSpeed's CPU build. It needs Python 3.11 or newer, and counts comprehensions as calls before 3.12.
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
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "zero_plugin"


def code_lines(text: str) -> set[int]:
    """Return the numbers of the lines that contain code, without docstrings, comment lines and blank lines."""
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
    """Return the numbers of the lines that import, or list `__all__`."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        listing = isinstance(node, ast.Assign) and any(
            getattr(target, "id", "") == "__all__" for target in node.targets
        )
        if listing or isinstance(node, (ast.Import, ast.ImportFrom)):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def cyclic_packages(graph: grimp.ImportGraph) -> list[set[str]]:
    """Return groups of packages and top-level modules that import each other in a cycle; late imports count."""

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
    """Print the rows that need no run."""
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


# A walk counts the calls of the package's functions, on all threads. Calls within torch and DeepSpeed are not counted.
_WALK = """
import json, os, sys, threading
package = sys.argv[3]
calls = []
def note(frame, event, argument):
    if event == "call" and frame.f_code.co_filename.startswith(package):
        calls.append((frame.f_code.co_filename[len(package):], frame.f_code.co_qualname))
def walk(name, function, *arguments):
    calls.clear()
    threading.setprofile(note); sys.setprofile(note)
    try:
        return function(*arguments)
    finally:
        sys.setprofile(None); threading.setprofile(None)
        if os.environ.get("RANK", "0") == "0":
            print("WALK", json.dumps([name, calls]), flush=True)
import torch
if sys.argv[4] == "accelerate":
    from accelerate import Accelerator
else:
    from zero_plugin import Accelerator
setting, folder = json.loads(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
accelerator = Accelerator(**setting)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
samples = torch.utils.data.TensorDataset(torch.randn(512, 8), torch.randn(512, 1))
data = torch.utils.data.DataLoader(samples, batch_size=4)
model, optimizer, data = walk("prepare", accelerator.prepare, model, optimizer, data)
def step(x, y):
    loss = torch.nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
names = {4: "sampled step 5", 20: "step 21"}
for i, (x, y) in enumerate(data):
    walk(names[i], step, x, y) if i in names else step(x, y)
    if i == 30:
        break
walk("save_state", accelerator.save_state, folder)
walk("load_state", accelerator.load_state, folder)
accelerator.end_training()
"""
_ENGINE = {"distributed_type": "DEEPSPEED", "use_cpu": True}
_WALKS: dict[str, dict[str, Any]] = {
    "one device": {"config": {"distributed_type": "NO", "use_cpu": True}},
    "DDP": {"config": {"distributed_type": "MULTI_CPU", "use_cpu": True}},
    "ZeRO-2": {"config": {**_ENGINE, "deepspeed_config": {"zero_optimization": {"stage": 2}}}},
    "ZeRO-3": {"config": {**_ENGINE, "deepspeed_config": {"zero_optimization": {"stage": 3}}}},
    "one device, off": {"config": {"distributed_type": "NO", "use_cpu": True, "checks": "off"}},
    "ZeRO-2, off": {"config": {**_ENGINE, "checks": "off", "deepspeed_config": {"zero_optimization": {"stage": 2}}}},
    "ZeRO-3, off": {"config": {**_ENGINE, "checks": "off", "deepspeed_config": {"zero_optimization": {"stage": 3}}}},
    "stage: auto": {"config": {**_ENGINE, "deepspeed_config": {"zero_optimization": {"stage": "auto"}}}},
}


def trace(setting: dict[str, Any], processes: int, library: str = "zero_plugin") -> list[tuple[str, list[list[str]]]]:
    """Return the calls of each walk of one training, on rank 0: each call's file in the package and its function."""
    package = f"{_folder_of(library)}{os.sep}"
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "walk.py")
        script.write_text(_WALK)
        start = [sys.executable]
        if processes > 1:
            start += ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        arguments = (json.dumps(setting), str(Path(folder, "saved")), package, library)
        done = subprocess.run(
            [*start, str(script), *arguments],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            cwd=folder,
        )
    if done.returncode:
        print(done.stderr[-2000:])
    return [tuple(json.loads(line[5:])) for line in done.stdout.splitlines() if line.startswith("WALK ")]


def _folder_of(library: str) -> Path:
    """Return the folder of a package. For zero_plugin it is the checkout's, even if another one is installed."""
    if library == PACKAGE.name:
        return PACKAGE
    found = find_spec(library)
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def print_walks(files: bool) -> None:
    """Print the calls, functions, files and switches between files of each walk."""
    print(f"{'':16} {'processes':>9}  {'walk':16} {'calls':>6} {'functions':>9} {'files':>6} {'switches':>8}")
    for processes in (1, 2):
        for name, setting in _WALKS.items():
            if processes > 1 and name == "one device":
                continue
            for walk, calls in trace(setting, processes):
                entered = [file for file, _ in calls]
                switches = sum(one != other for one, other in pairwise(entered))
                functions = len({tuple(call) for call in calls})
                row = f"{len(calls):6} {functions:9} {len(set(entered)):6} {switches:8}"
                print(f"{name:16} {processes:9}  {walk:16} {row}", flush=True)
                if files:
                    for file, count in Counter(entered).most_common():
                        print(f"{'':30}{count:5}  {file}")


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

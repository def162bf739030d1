"""Decorators of tests that run in several processes: `@on_paths("ddp", "zero2")` and `@in_processes(2)`.

pytest collects each of these tests once per path. For example, `pytest tests/strategies/test_loop.py::test_name[zero2]`
runs one. The body does not run in pytest's process. All tests of a folder with the same number of processes share one
group of processes, in which `group_worker.py` runs their bodies one after the other. A test that is `alone` has its own
group. With `--unpooled SEED` each test has its own group.

A body declares the arguments that it needs: `path`, the name of the path; `rank` and `world`, of its process group;
`folder`, an empty folder that all processes share; and the arguments of its `pytest.mark.parametrize`: strings, numbers
or None. A body that takes `store` runs in its own processes, which have no process group yet. `store` is an
`init_method` at which they can meet. Its processes must exit with 0. Another test can call the body:
`test_name.body(…)`.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import pytest

LOOP: Final = ("single", "zero2-one-process", "ddp", "zero0", "zero1", "zero2", "zero3", "zero2-cpu")
"""The paths of a test of what every training loop does."""
ALL: Final = (*LOOP, "zero1-cpu", "zero3-cpu", "zero3-gathered")
"""All paths that need neither a GPU nor NVMe."""
ENGINE: Final = tuple(path for path in ALL if path.startswith("zero"))
"""Those of `ALL` on which DeepSpeed's engine trains."""
SEVERAL: Final = tuple(path for path in ALL if path not in ("single", "zero2-one-process"))
"""Those of `ALL` that run in two processes."""
SKIPPED: Final = "skipped: "
"""The beginning of the outcome of a test whose body has called `pytest.skip`."""
_ALONE: Final = "-one-process"
_OF_GROUPS: Final = ("path", "world", "rank", "folder", "store")


def on_paths(
    *paths: str, daily: str | Iterable[str] | None = None, processes: Iterable[int] = (), alone: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test on each of `paths`.

    Args:
        *paths: names of `ALL`, or another one that the test knows. `single` and names that end in `-one-process` run in
            one process, others in two.
        daily: the paths on which the test runs daily; by default all. On others it runs in `make campaign`.
        processes: the numbers of processes, if they differ.
        alone: whether the test has its own processes, because it changes them.
    """
    every_day = set(paths if daily is None else [daily] if isinstance(daily, str) else daily)
    assert every_day <= set(paths), f"{every_day - set(paths)} are not among the paths"
    rows = [
        row(path.removesuffix(_ALONE), world, daily=path in every_day)
        for path in paths
        for world in processes or ([1] if path == "single" or path.endswith(_ALONE) else [2])
    ]
    return lambda body: _grouped(body, rows, alone=alone)


def without(paths: Iterable[str], *names: str) -> tuple[str, ...]:
    """Return the other ones of `paths`."""
    return tuple(path for path in paths if path not in names)


def in_processes(*worlds: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test in a group of processes, once for each number of them."""
    rows = [pytest.param("", world, id=f"{world}-processes") for world in worlds]
    return lambda body: _grouped(body, rows)


def on_rows(
    names: Sequence[str], rows: Iterable[Any], *, alone: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the test once for each row.

    Args:
        names: the arguments of the test in the rows, after `path` and `world`.
        rows: each a `pytest.param(path, world, *arguments)` that `row` returns.
        alone: whether each row has its own processes.
    """
    return lambda body: _grouped(body, rows, names, alone=alone)


def row(path: str, world: int, *arguments: str | float | None, daily: bool) -> Any:
    """Return a row of `on_rows`: a path or "", the number of processes, the arguments, and whether the row is daily."""
    if not path:
        name = "-".join(map(str, (f"{world}-processes", *arguments)))
    else:
        name = "-".join(map(str, (path, *arguments, *([world] if world > 2 else []))))
        if world == 1 and path != "single":
            name += _ALONE
    return pytest.param(path, world, *arguments, id=name, marks=[] if daily else [pytest.mark.campaign])


def _grouped(
    body: Callable[..., None], rows: Iterable[Any], given: Sequence[str] = (), *, alone: bool = False
) -> Callable[..., None]:
    """Return the test that pytest collects instead of `body`."""

    def test(run_in_group: Callable[[], None], **_: Any) -> None:
        run_in_group()

    parameters = inspect.signature(body).parameters
    own = [name for name in parameters if name not in _OF_GROUPS]
    names = ("run_in_group", "path", "world", *own)
    test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    )
    test.__name__, test.__qualname__, test.__doc__, test.__module__ = (
        *(body.__name__, body.__qualname__),
        *(body.__doc__, body.__module__),
    )
    test.body = body  # type: ignore[attr-defined]
    test.is_alone = alone or "store" in parameters  # type: ignore[attr-defined]
    test.pytestmark = list(getattr(body, "pytestmark", ()))  # type: ignore[attr-defined]
    for mark in (
        pytest.mark.processes,
        pytest.mark.timeout(3600),  # of all tests of the group, which run with the first of them
        pytest.mark.parametrize(("path", "world", *given), list(rows)),
    ):
        test = mark(test)
    return test


def group_of(item: pytest.Item) -> tuple[str, int] | None:
    """Return the folder and the number of processes of a test's group, or None for a test that shares no group."""
    if getattr(getattr(item, "function", None), "is_alone", True):
        return None
    return item.path.parent.name, item.callspec.params["world"]  # type: ignore[attr-defined]


def request_of(item: Any) -> dict[str, Any]:
    """Return the request for the test that `group_worker.py` reads."""
    parameters = inspect.signature(item.function.body).parameters
    given = item.callspec.params
    return {
        "id": item.nodeid,
        "file": str(item.path),
        "function": item.originalname,
        "arguments": {name: given[name] for name in parameters if name in given},
        "takes": [name for name in ("rank", "folder", "store") if name in parameters],
    }


def run_here(script: Path, world: int, requests: Path, folder: Path) -> list[str]:
    """Run a test with process 0 in this process, so `breakpoint()` in its body stops here.

    The other processes ignore breakpoints and wait up to an hour in a collective. Their output is returned after "".
    """
    import group_worker
    from launching import start_script, wait_for_ends

    store = folder / "store"
    variables = {group_worker.PATIENCE: "3600", "PYTHONBREAKPOINT": "0"}
    arguments = [(store, rank, world, requests, folder) for rank in range(world)]
    logs = [folder / f"{rank}.log" for rank in range(world)]
    others = [start_script(script, *arguments[rank], log=logs[rank], variables=variables) for rank in range(1, world)]
    with pytest.MonkeyPatch.context() as patch:
        for name in group_worker.place_process("0", str(world)):
            patch.setenv(name, "")
        patch.setenv(group_worker.PATIENCE, "3600")
        patch.setattr(sys, "argv", [str(script), *map(str, arguments[0])])
        try:
            group_worker.main()
        finally:
            deadline = time.monotonic() + 10
            wait_for_ends(others, lambda _: time.monotonic() > deadline)
    return [log.read_text() if log.exists() else "" for log in logs]


class Groups:
    """The groups of processes of this session, each with the folder of its outcomes."""

    def __init__(self) -> None:
        self._outcomes: dict[Any, Path] = {}
        self._outputs: dict[Any, list[str]] = {}

    def run(self, item: Any, *, together: Iterable[Any], folder: Path, start: Callable[..., Any], key: Any) -> None:
        """Fail unless a test passed on each process of its group, which is started if it has not run yet.

        Args:
            item: the test.
            together: the tests of its group.
            folder: an empty folder, for a new group.
            start: runs a script in several processes, and returns each one's output.
            key: name of the group.
        """
        world = item.callspec.params["world"]
        if key not in self._outcomes:
            self._outcomes[key] = folder
            requests = folder / "requests.json"
            requests.write_text(json.dumps([request_of(other) for other in together]))
            self._outputs[key] = start(Path(__file__).with_name("group_worker.py"), world, requests, folder)
        outcomes = [json.loads(file.read_text()) for file in sorted(self._outcomes[key].glob("rank-*.json"))]
        assert len(outcomes) == world, "the processes of this group did not run to their end"
        found = [outcome[item.nodeid] for outcome in outcomes]
        if all(text.startswith(SKIPPED) for text in found):
            pytest.skip(found[0].removeprefix(SKIPPED))
        failures = [
            f"--- process {rank}\n{printed_by(output, item.nodeid) or text}"
            for rank, (text, output) in enumerate(zip(found, self._outputs[key], strict=True))
            if text != "ok"
        ]
        assert not failures, "\n".join(failures)


def printed_by(output: str, name: str) -> str:
    """Return a test's output and traceback from all output of a process of its group."""
    return output.partition(f"=== {name}\n")[2].partition("\n=== ")[0]

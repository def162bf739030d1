"""Fixtures that several folders of tests share."""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent))
from build_ops import build_ops, use_quick_compiler
from device import ON_GPU
from forked import SERVER, ForkServer
from on_paths import Groups, group_of, run_here
from tried import pytest_terminal_summary, tried  # noqa: F401 - a hook and a fixture

from zero_plugin.distributed.messages import show_messages

pytest_plugins = ("launching",)  # its fixtures

# Files and folders of the half with several processes that take a minute of two processors, the longest first.
_LONGEST = (
    "strategies",  # its tests of on_paths.py
    "launch/test_engine.py",
    "launch/test_namespaces.py",
    "parity/test_parity.py",
    "strategies/test_end.py",
    "launch/test_notebook.py",
    "transformers",
    "launch/test_loopback.py",
    "faults/test_interruptions.py",
)
_LARGEST_GROUP = 400  # daily tests that share processes; more of them would be the last to end
# The same examples on every run, so that a red run means a change; `make campaign` draws new ones, and more of them.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of tests that run in a group of processes."""
    parser.addoption(
        "--unpooled", type=int, metavar="SEED", help="each test in processes of its own, in an order drawn by SEED"
    )
    parser.addoption(
        "--here", action="store_true", help="run process 0 of a test in pytest's own process, for a debugger"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Messages appear, all processes of the tests build C++ ops by one compiler, and take forks of one process.

    On a GPU there are no forks: what DeepSpeed is on is settled when it is imported.
    """
    show_messages()
    if not ON_GPU:
        use_quick_compiler()
    startup = str(Path(__file__).parent / "startup")  # what it holds, all Pythons that tests start do first
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))
    if sys.modules.get("mlflow", ...) is None:  # pytest's own workers, which are started so too, run its tests
        del sys.modules["mlflow"]
    if not hasattr(config, "workerinput") and not ON_GPU and sys.platform == "linux":
        folder = tempfile.TemporaryDirectory()
        os.environ[SERVER] = str(Path(folder.name, "server"))
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(ForkServer(Path(os.environ[SERVER])).close)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """pytest's own log handlers are off the root logger, so that messages appear as they do in a script of a user."""
    root = logging.getLogger()
    handlers = root.handlers
    if "caplog" not in getattr(item, "fixturenames", ()):
        root.handlers = []
    try:
        return (yield)
    finally:
        root.handlers = handlers


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests of one process come first, while C++ ops are built, then the longest files.

    What starts processes for several tests at once stays in one of pytest's processes: a file, or those of its tests
    that run in the same processes.
    """
    here = Path(__file__).parent
    if (seed := config.getoption("--unpooled")) is not None:
        random.Random(seed).shuffle(items)
        return
    place = {here / name: number for number, name in enumerate(_LONGEST, start=1)}
    assert all(longest.exists() for longest in place)
    starting = [item for item in items if item.get_closest_marker("processes")]
    sizes: Counter[str] = Counter()
    for item in starting:
        asked = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        together = group_of(item) or (
            item.path.relative_to(here).with_suffix(""),
            *(asked[name] for name in ("path", "world") if name in asked),
        )
        group = "-".join(map(str, together))
        is_daily = not item.get_closest_marker("campaign")
        part = sizes[group] // _LARGEST_GROUP
        sizes[group] += is_daily
        item.add_marker(pytest.mark.xdist_group(f"{group}-part{part}" if part else group))
    last = len(place) + 1
    starts = set(map(id, starting))

    def order(item: pytest.Item) -> int:
        if id(item) not in starts:
            return 0
        return place.get(item.path, last) if group_of(item) is None else place.get(item.path.parent, last)

    items.sort(key=order)


def _group_of(item: pytest.Item) -> str | None:
    """The name of the tests that run in the same processes."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """The groups hold, and what the imports made stays: every `end_training` would walk all of it each time.

    pytest-xdist 3.8 writes the groups into an attribute that pytest 9.2 does not read: each of its processes then runs
    all that tests share, several times over.
    """
    if getattr(session.config.option, "loadgroup", False):
        ungrouped = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        ungrouped = [node for node in ungrouped if node.rfind("@") < node.rfind("::")]
        assert not ungrouped, f"pytest-xdist does not group tests with this pytest: {ungrouped[:3]}"
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Each of pytest's processes computes in one thread: where all have as many as processors, most wait in vain."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_default_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test, and no process that one starts, reads the default config of whoever runs the tests."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        environment.delenv("ZERO_PLUGIN_CONFIG_FILE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _accelerate_without_xla() -> Iterator[None]:
    """Accelerate, which some tests run beside the package, trains on XLA wherever torch_xla is installed."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("USE_TORCH_XLA", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals_end_children() -> Iterator[None]:
    """A shell starts what it puts into the background with SIGINT ignored, nohup SIGHUP, and programs inherit that."""
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangs_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupts)
    signal.signal(signal.SIGHUP, hangs_up)


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What runs resolve to is not kept in the user's own folder."""
    os.environ["ZERO_PLUGIN_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def built_ops() -> None:
    """DeepSpeed's C++ ops for offload, built before a test's own time limit starts: minutes on a new machine."""
    if "ZERO_PLUGIN_TESTS_BUILT_OPS" in os.environ:
        return  # a test that starts pytest itself has had them built
    build_ops()
    os.environ["ZERO_PLUGIN_TESTS_BUILT_OPS"] = "1"


@pytest.fixture(scope="session")
def groups() -> Groups:
    """The groups of processes that run the tests of on_paths.py."""
    return Groups()


@pytest.fixture
def run_in_group(
    request: pytest.FixtureRequest,
    groups: Groups,
    run_processes: Callable[..., list[str]],
    tmp_path_factory: pytest.TempPathFactory,
    built_ops: None,
) -> Callable[[], None]:
    """Fail unless this test, which a decorator of on_paths.py has made, passed on each process of its group."""

    def run() -> None:
        item, is_here = request.node, request.config.getoption("--here")
        is_alone = is_here or item.function.is_alone or request.config.getoption("--unpooled") is not None
        key = item.nodeid if is_alone else _group_of(item)
        together = [item] if is_alone else [other for other in request.session.items if _group_of(other) == key]
        start = run_here if is_here else run_processes
        groups.run(item, together=together, folder=tmp_path_factory.mktemp("group"), start=start, key=key)

    return run


@pytest.fixture(scope="module", autouse=True)
def _collects_what_is_new() -> None:
    """What earlier files have imported stays: each `end_training` would walk all of it, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_no_group() -> Iterator[None]:
    """A test leaves no process group in this process: programs that later tests start would take it for their own."""
    yield
    rank, *_ = (os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert rank is None, "the test has started a process group and left it; see ends_processes"


@pytest.fixture
def ends_processes() -> Iterator[None]:
    """For tests that leave an `Accelerator` to itself: its process group would be the next test's of this process."""
    yield
    from zero_plugin.state import AcceleratorState, PartialState

    if PartialState._shared_state:
        PartialState().destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()

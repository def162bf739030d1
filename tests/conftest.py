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

# Files and folders of the multi-process half that take a minute of two processors, the longest first.
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
# The same examples on every run, so a red run means a change; `make campaign` draws new ones, and more of them.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("campaign", max_examples=2000, deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options of tests that run in a group of processes."""
    parser.addoption(
        "--unpooled", type=int, metavar="SEED", help="each test in processes of its own, in an order drawn by SEED"
    )
    parser.addoption(
        "--here", action="store_true", help="run process 0 of a test in pytest's own process, for a debugger"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Show messages, build C++ ops with one compiler in all processes, and fork workers from one process.

    On a GPU there are no forks: the import settles DeepSpeed's device.
    """
    show_messages()
    if not ON_GPU:
        use_quick_compiler()
    startup = str(Path(__file__).parent / "startup")  # every Python that a test starts runs its content first
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (startup, os.environ.get("PYTHONPATH"))))
    if sys.modules.get("mlflow", ...) is None:  # pytest's own workers start this way too, and run its tests
        del sys.modules["mlflow"]
    if not hasattr(config, "workerinput") and not ON_GPU and sys.platform == "linux":
        folder = tempfile.TemporaryDirectory()
        os.environ[SERVER] = str(Path(folder.name, "server"))
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(ForkServer(Path(os.environ[SERVER])).close)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Take pytest's own log handlers off the root logger, so messages appear as in a user's script."""
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
    """Put tests of one process first, while C++ ops are built, then the longest files.

    Tests that share started processes stay in one of pytest's processes: a file, or its tests in one group.
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
    """Return the name of the tests that run in the same processes."""
    mark = item.get_closest_marker("xdist_group")
    return mark.args[0] if mark else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Check the groups, and freeze the objects of imports: every `end_training` would walk all of them.

    pytest-xdist 3.8 writes the groups into an attribute that pytest 9.2 does not read. Each of its processes would then
    run all tests that share processes, several times over.
    """
    if getattr(session.config.option, "loadgroup", False):
        ungrouped = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        ungrouped = [node for node in ungrouped if node.rfind("@") < node.rfind("::")]
        assert not ungrouped, f"pytest-xdist does not group tests with this pytest: {ungrouped[:3]}"
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Limit each of pytest's processes to one thread. With a thread per core in all of them, most would only wait."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _no_default_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Hide the user's default config from all tests, and from the processes that they start."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        environment.delenv("ZERO_PLUGIN_CONFIG_FILE", raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _accelerate_without_xla() -> Iterator[None]:
    """Keep Accelerate, which some tests also run, off XLA. It trains on XLA if torch_xla is installed."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("USE_TORCH_XLA", "0")
        yield


@pytest.fixture(scope="session", autouse=True)
def _signals_end_children() -> Iterator[None]:
    """Restore SIGINT and SIGHUP.

    Background jobs of a shell ignore SIGINT, nohup ignores SIGHUP. Programs inherit this.
    """
    interrupts = signal.signal(signal.SIGINT, signal.default_int_handler)
    hangs_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupts)
    signal.signal(signal.SIGHUP, hangs_up)


@pytest.fixture(scope="session", autouse=True)
def runs_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the records of runs out of the user's own folder."""
    os.environ["ZERO_PLUGIN_RUNS"] = str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def built_ops() -> None:
    """Build DeepSpeed's C++ ops for offload before a test's own time limit starts: minutes on a new machine."""
    if "ZERO_PLUGIN_TESTS_BUILT_OPS" in os.environ:
        return  # if a test starts pytest itself, the outer pytest has built them
    build_ops()
    os.environ["ZERO_PLUGIN_TESTS_BUILT_OPS"] = "1"


@pytest.fixture(scope="session")
def groups() -> Groups:
    """Return the groups of processes that run the tests of on_paths.py."""
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
    """Freeze the imports of earlier files: each `end_training` would walk all of them, for half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leaves_no_group() -> Iterator[None]:
    """Check that a test leaves no process group here: programs of later tests would take it for their own."""
    yield
    rank, *_ = (os.environ.pop(name, None) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    assert rank is None, "the test has started a process group and left it; see ends_processes"


@pytest.fixture
def ends_processes() -> Iterator[None]:
    """End the processes of a test that does not end its `Accelerator`. The next test would get its process group."""
    yield
    from zero_plugin.state import AcceleratorState, PartialState

    if PartialState._shared_state:
        PartialState().destroy_process_group()
        AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()

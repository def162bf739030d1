"""Run trainings with given configurations, each in its own process, and report the differences between two of them.

Reads lines of JSON, `[name, configuration, configuration, number of processes]`. Lines with the same first
configuration come one after the other, and its imports run here once for all of them. Answers each with a line `EFFECT`
and JSON:
`[name, what the second run did otherwise, what it only held otherwise, what it alone said, its error, the first's]`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import io
import itertools
import json
import logging
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import traceback
import types
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is imported
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # DeepSpeed's Muon is compiled, for a minute
# ruff: noqa: E402
import cpuinfo

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)
cpuinfo.get_cpu_info()
import deepspeed
import torch
from torch import nn

import zero_plugin
from zero_plugin import Accelerator, DummyOptim, DummyScheduler
from zero_plugin.errors import CheckpointError

_DEEPSPEED = str(Path(deepspeed.__file__).parent)
_PACKAGE = str(Path(zero_plugin.__file__).parent)
_TORCH = str(Path(torch.__file__).parent)
# Functions that read the configuration, show it, pass it on or write it. A changed value there is no effect.
_READERS = (
    "checkpoint/objects.py",
    "config.py",
    "config_utils.py",
    "constants.py",
    "utils/logging.py",
    "config_v2.py",
    "logger.py",
    "build_lock.py",
)
_OF_PACKAGE = ("strategies/", "checkpoint/", "data/", "loop/", "trackers/")
_OF_TORCH = ("optim/", "distributed/", "nn/modules/module.py")
# Attributes by which the C++ object that reads and writes files describes itself.
_OF_AIO_HANDLE = tuple(
    f"get_{name}" for name in ("block_size", "queue_depth", "single_submit", "overlap_events", "intra_op_parallelism")
)
_COPIES = {"config", "_config", "config_params", "config_dict", "ds_config", "param_dict", "_param_dict", "user_config"}
_DESCRIPTIONS = ("resolved_config.json", "manifest.json", "training.json")  # in a saved folder: the configured values
# Noise in names of files and folders: time, machine, process. Noise in output: addresses of printed objects, free
# memory and uninitialized values; the numbers of layers that a module prints on one line after equal times, and the
# slowest kind of layer.
_OF_THIS_PROCESS = re.compile(
    r"(?<=tfevents\.)\d+\.[\w.-]+?\.\d+(?=\.\d)|(?<=zero_plugin-swap-)\d+-\w+|(?<= at 0x)[0-9a-f]+"
    r"|(?<=\(available=)\d+|(?<= \()\d+(-\d+)?(?=\): )|(?<=fwd latency - {')\w+"
    r"|(?<=_flat_cpu_memory\[0\]\": \")[^\"]*"
)
_HEAD = re.compile(r"^\[[\d-]+ [\d:,]+\] (\[\w+\] \[[^]]*\] )?")  # in DeepSpeed's log
_CONFIGURATION = re.compile(r"^\[[\d-]+ [\d:,]+\] \[INFO\] \[config\.py:")
_TENSOR = re.compile(r"\([\d, ]*\) torch\.")  # as `plain` shows it
_DEEDS = ("loss", "rates", "weight", "files", "hooks", "printed")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.Size, torch.device)


class Calls:
    """The functions that ran, with their plain arguments and counts."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    @functools.cache  # noqa: B019 - one for the life of the process
    def _place(self, file: str) -> str | None:
        for root, kept in ((_DEEPSPEED, None), (_PACKAGE, _OF_PACKAGE), (_TORCH, _OF_TORCH)):
            if file.startswith(root):
                inside = file[len(root) + 1 :]
                if inside.endswith(_READERS) or (kept is not None and not inside.startswith(kept)):
                    return None
                return f"{Path(root).name}/{inside}"
        return None

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event not in ("call", "c_call"):
            return
        place = self._place(frame.f_code.co_filename)
        if place is None:
            return
        if event == "c_call":
            if place.startswith("deepspeed"):
                self.seen[f"{place}:{frame.f_code.co_name} -> {argument.__name__}"] += 1
            return
        code = frame.f_code
        if code.co_name == "_is_not_of_untested":  # runs where DeepSpeed logs
            return
        self.seen[f"{place}:{code.co_qualname if sys.version_info >= (3, 11) else code.co_name}"] += 1
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for name in names:
            value = frame.f_locals.get(name)
            if name not in _COPIES and isinstance(value, (*_PLAIN, list, tuple)) and value is not None:
                shown = plain(value)
                if len(shown) < 120:
                    self.seen[f"{place}:{code.co_name}({name}={shown})"] += 1


def plain(value: Any, depth: int = 0) -> Any:
    """Return a plain value as text, or another object's type."""
    if isinstance(value, int) and value > 2**40:
        return "<an address>"  # as `id` gives it
    if isinstance(value, _PLAIN):
        return repr(value)[:200]
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {value.dtype} {value.device} {digest(value)}"
    if isinstance(value, list | tuple | set | frozenset) and depth < 4:
        return [plain(child, depth + 1) for child in itertools.islice(value, 64)]
    return f"<{type(value).__name__}>"


def digest(tensor: torch.Tensor) -> str:
    """Return a tensor's sum, or the sum of the beginning of a buffer of gigabytes."""
    if not tensor.numel() or not tensor.is_floating_point() or tensor.is_meta:
        return ""
    numbers = tensor.detach().as_strided((min(tensor.numel(), 4096),), (1,)) if tensor.is_contiguous() else tensor
    return f"{numbers.double().sum().item():.9g}"


def attributes(owner: Any, name: str, found: dict[str, Any]) -> None:
    """Return the plain attributes of an object and of its members, nearest first, without configurations."""
    seen: set[int] = set()
    waiting = deque([(owner, name, 0)])
    while waiting and len(found) < 60_000:
        owner, name, depth = waiting.popleft()
        if isinstance(owner, _PLAIN):  # True and 64 are single objects everywhere
            found[name] = plain(owner)
        elif depth <= 7 and id(owner) not in seen:
            seen.add(id(owner))
            waiting.extend((child, f"{name}{part}", depth + 1) for part, child in held_by(owner, name, found))


def held_by(owner: Any, name: str, found: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield an object's members, by the end of their names. Record the object's own value or kind in `found`."""
    if isinstance(owner, torch.Tensor):
        found[name] = plain(owner)
        if isinstance(owner, nn.Parameter):
            yield from ((f".{key}", value) for key, value in vars(owner).items())
    elif isinstance(owner, dict):
        for key, value in itertools.islice(owner.items(), 200):
            said = key if isinstance(key, str | int) and not isinstance(key, bool) else type(key).__name__
            if said not in _COPIES and (not isinstance(said, int) or said < 10**6):
                yield f"[{said}]", value
    elif isinstance(owner, list | tuple | set):
        found[f"{name}#"] = len(owner)
        yield from ((f"[{n}]", value) for n, value in enumerate(itertools.islice(owner, 64)))
    elif isinstance(owner, types.FunctionType | types.MethodType | functools.partial | type):
        found[name] = getattr(owner, "__qualname__", type(owner).__name__)
    else:
        kind = type(owner)
        if "onfig" in kind.__name__ or "config" in kind.__module__.rpartition(".")[2]:
            return
        found[f"{name}:"] = kind.__qualname__
        for getter in _OF_AIO_HANDLE if kind.__qualname__ == "aio_handle" else ():
            found[f"files by {name}, {getter}"] = plain(getattr(owner, getter)())
        if kind.__module__.startswith(("deepspeed", "torch.optim", "torch.nn", "__main__", "cprofile")):
            yield from ((f".{key}", v) for key, v in getattr(owner, "__dict__", {}).items() if key not in _COPIES)


def surroundings() -> dict[str, Any]:
    """Return a run's possible leftovers in the process: modules' switches, loggers, garbage collector, environment."""
    found: dict[str, Any] = {"gc": gc.isenabled(), "threads": torch.get_num_threads()}
    found |= {f"level of {name}": logging.getLogger(name).level for name in ("DeepSpeed", "deepspeed")}
    found |= {f"${name}": value for name, value in os.environ.items()}
    for name, module in list(sys.modules.items()):
        if name.startswith("deepspeed") and "config" not in name and "constants" not in name:
            for key, value in list(vars(module).items()):
                if isinstance(value, _PLAIN) and not key.startswith("__"):
                    found[f"{name}.{key}"] = plain(value)
    for key, value in vars(deepspeed.comm.comm.comms_logger).items():
        found[f"comms_logger.{key}"] = plain(value)
    return found


class Net(nn.Module):
    """A model in which most keys can have an effect: layers of several sizes, a norm with buffers, an embedding."""

    def __init__(self, with_unused: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4, bias=False)
        self.register_buffer("scale", torch.ones(4))
        if with_unused:
            self.unused = nn.Parameter(torch.ones(8))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words).mean(1)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x.to(self.norm.weight.dtype)).to(self.last.weight.dtype)) * self.scale


def fill(module: nn.Module) -> None:
    """Give a layer weights, as an initialisation that `Module.apply` runs."""
    if isinstance(module, nn.Linear):
        nn.init.constant_(module.weight, 0.1)


def train(configuration: dict[str, Any], found: dict[str, Any]) -> None:
    """Train seven batches, save, and return the observations."""
    torch.manual_seed(1)
    deepspeed_config = configuration.get("deepspeed_config", {})
    for part in ("offload_optimizer", "offload_param"):  # the folder is this process's own
        section = deepspeed_config.get("zero_optimization", {}).get(part)
        if section and section.get("nvme_path"):
            section["nvme_path"] = str(Path.cwd() / section["nvme_path"])
    accelerator = Accelerator(config=configuration)
    zero = deepspeed_config.get("zero_optimization", {})
    if "override_module_apply" in zero:
        with accelerator.init_model():
            model = Net()
            model.apply(fill)
    else:
        model = Net("ignore_unused_parameters" in zero)
    optimizer = DummyOptim(model.parameters())
    data = torch.utils.data.TensorDataset(torch.arange(64).reshape(16, 4) % 32)
    loader = torch.utils.data.DataLoader(data, batch_size=2)
    scheduler = DummyScheduler(optimizer) if "scheduler" in deepspeed_config else None
    measures = deepspeed_config.get("scheduler", {}).get("type") == "ReduceLROnPlateau"
    prepared = accelerator.prepare(model, optimizer, loader, *([scheduler] if scheduler else []))
    model, optimizer, loader = prepared[:3]
    rates = []
    for n, (batch,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = (model(batch).float() - 1).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            if scheduler:
                prepared[3].step(*([loss.item()] if measures else []))
            rates += [group.get("lr") for group in optimizer.param_groups]
            found[f"loss {n}"] = loss.item()
            optimizer.zero_grad()
        if n == 6:  # from its sixth step on, RAdam divides by the second moment
            break
    sys.setprofile(None)
    found["rates"] = rates
    found |= {f"files: {path}": "a folder" for path in Path().rglob("*") if path.is_dir()}
    attributes(getattr(model, "__dict__", {}), "engine", found)
    for parameter in model.parameters():
        attributes(getattr(parameter, "nvme_swapper", None), "swapper", found)
    for n, group in enumerate(optimizer.param_groups):
        found |= {f"group {n} {key}": plain(value) for key, value in group.items() if key != "params"}
    found |= {f"weight {key}": plain(value) for key, value in (accelerator.get_state_dict(model) or {}).items()}
    for name, module in model.named_modules():
        hooks = {
            k: [getattr(h, "__qualname__", type(h).__name__) for h in v.values()]
            for k, v in vars(module).items()
            if k.endswith("_hooks")
        }
        found |= {f"hooks {name}{key}": value for key, value in hooks.items() if value}
    found |= surroundings()
    calls = Calls()
    sys.setprofile(calls)
    with contextlib.suppress(CheckpointError):  # Muon's states on NVMe cannot be saved
        accelerator.save_state("saved")
    sys.setprofile(None)
    found["calls of save"] = dict(calls.seen)
    accelerator.end_training()


def record(configuration: dict[str, Any]) -> dict[str, Any]:
    """Train in the working directory and return the observations."""
    found: dict[str, Any] = {}
    calls, error = Calls(), ""
    sys.setprofile(calls)
    try:
        train(configuration, found)
    except BaseException as raised:  # noqa: BLE001 - whatever ends a run is what it says
        sys.setprofile(None)
        error = "".join(traceback.format_exception(raised)[-1:]) + (
            ""
            if type(raised).__module__.startswith("zero_plugin")
            else "".join(traceback.format_exception(raised)[-4:])
        )
    sys.setprofile(None)
    if error and os.environ.get("RANK", "0") != "0":
        print(error)
    found["calls"] = dict(calls.seen)
    found["files"] = {
        str(p): p.stat().st_size for p in sorted(Path().rglob("*")) if p.is_file() and p.name not in _DESCRIPTIONS
    }
    sys.stdout.flush()
    return {"found": found, "said": "", "error": error, "modules": list(sys.modules)}


def forked(configuration: dict[str, Any], world: int = 1, seconds: int = 300) -> dict[str, Any]:
    """Run `record` in `world` children, in their own folder, and return the first child's result."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        result, work = Path(folder) / "result", Path(folder) / "work"
        work.mkdir()
        processes = []
        for rank in range(world):
            process = os.fork()
            processes.append(process)
            if process:
                continue
            try:
                os.chdir(work)
                if world > 1:
                    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
                    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(held.getsockname()[1]))
                held.close()
                sink = os.open(Path(folder) / f"output{rank or ''}", os.O_WRONLY | os.O_CREAT)
                os.dup2(sink, 1)
                os.dup2(sink, 2)
                signal.alarm(seconds)
                outcome = record(configuration)
                if not rank:
                    result.write_bytes(pickle.dumps(outcome))
            finally:
                os._exit(0)
        held.close()
        for process in processes:
            os.waitpid(process, 0)
        output = (Path(folder) / "output").read_text(errors="replace")
        if not result.exists():
            return {"found": {}, "said": output, "error": f"ended\n{output[-500:]}", "modules": []}
        outcome = pickle.loads(result.read_bytes())
        outcome["said"] += output
        for log in Path(folder).glob("output?") if outcome["error"] else ():
            outcome["error"] += f"\n{log.name}: {log.read_text(errors='replace')[-2000:]}"
        # In printed lines, the words before a measured number.
        lines = (_HEAD.sub("", line) for line in without_configuration(output.splitlines()))
        outcome["found"]["printed"] = dict.fromkeys((line.partition(":")[0] for line in lines), "a line")
        text = json.dumps(outcome["found"], default=str).replace(folder, "FOLDER")
        found = json.loads(_OF_THIS_PROCESS.sub("HERE", text))
        return {**outcome, "found": found, "said": outcome["said"].replace(folder, "FOLDER")}


def without_configuration(lines: list[str]) -> Iterator[str]:
    """Return the lines without those in which DeepSpeed shows its configuration. The last of them is JSON."""
    in_json = False
    for line in lines:
        shown = _CONFIGURATION.match(line) is not None
        in_json = line.endswith("{") if shown else in_json and not line.startswith("}")
        if not shown and not in_json:
            yield line


def flat(found: dict[str, Any]) -> dict[str, Any]:
    """Flatten one level of keys."""
    flattened = {}
    for key, value in found.items():
        if isinstance(value, dict):
            flattened |= {f"{key}: {name}": child for name, child in value.items()}
        else:
            flattened[key] = value
    return flattened


def without_value(key: str) -> str:
    """Return the name under which an observation varies: a call's argument without its value."""
    return key.partition("=")[0]


@functools.cache
def base(configuration: str, world: int) -> tuple[dict[str, Any], dict[str, Any], set[str], set[str]]:
    """Run a configuration twice. Return the first outcome, flat, and the names that differ by chance."""
    one = forked(json.loads(configuration), world)
    if import_all(one["modules"]):
        one = forked(json.loads(configuration), world)
    other = forked(json.loads(configuration), world)
    first, second = flat(one["found"]), flat(other["found"])
    noise = {without_value(key) for key in {*first, *second} if first.get(key) != second.get(key)}
    return first, one, noise, {*one["said"].splitlines(), *other["said"].splitlines()}


def is_deed(key: str, before: Any, after: Any) -> bool:
    """Return whether a difference is in the training itself: numbers, memory, files, hooks, prints, functions.

    Otherwise an object only holds the value or a function takes it, possibly without effect.
    """
    called = key.startswith("calls") and "(" not in key
    shapes = [str(value).partition(")")[0] for value in (before, after) if _TENSOR.match(str(value))]
    return key.startswith(_DEEDS) or called or len(set(shapes)) == 2


def compare(name: str, before: dict[str, Any], after: dict[str, Any], world: int) -> list[Any]:
    """Return the differences of the second configuration."""
    first, outcome, noise, said = base(json.dumps(before, sort_keys=True), world)
    run = forked(after, world)
    then = flat(run["found"])
    differing = sorted(key for key in {*first, *then} if first.get(key) != then.get(key))
    changed = [key for key in differing if without_value(key) not in noise and not run["error"]]
    new = [line for line in run["said"].splitlines() if line not in said]
    shown = {key: f"{key}: {first.get(key)} -> {then.get(key)}"[:300] for key in changed}
    done = {key for key in changed if is_deed(key, first.get(key), then.get(key))}
    deeds = sorted(done, key=lambda key: (not key.startswith(_DEEDS[:3]), key.startswith("calls"), key))
    held = [key for key in changed if key not in done]
    return [name, [shown[key] for key in deeds], [shown[key] for key in held], new, run["error"], outcome["error"]]


def import_all(modules: list[str]) -> bool:
    """Import a run's modules here, once for all later runs. Return whether any were new.

    No other step of a run happens in this process.
    """
    new = [name for name in modules if name not in sys.modules]
    for name in new:
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    return bool(new)


def main() -> None:
    """Answer line by line."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    for line in sys.stdin:
        answers.write("EFFECT" + json.dumps(compare(*json.loads(line))) + "\n")


if __name__ == "__main__":
    main()

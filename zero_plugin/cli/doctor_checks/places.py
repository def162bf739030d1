"""Folders that every run writes to, the machine's name, its ports, its memory nodes, its GPUs and its TPU.

The TPU and torch_xla are looked at without waking either.
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from zero_plugin.cli.doctor_checks.finding import Finding, Level, Needs
from zero_plugin.config.resolve.facts import installed_version
from zero_plugin.machine.hardware import core_ranges, port_is_free
from zero_plugin.machine.xla_runtime import PJRT_DEVICE, find_version_problem


def check_folders(environ: Mapping[str, str]) -> Iterator[Finding]:
    """TMPDIR and HOME: sockets, logs and handed-over files go to the first, built ops and records to the second."""
    temporary = environ.get("TMPDIR") or "/tmp"  # noqa: S108 - the system's own default
    for name, folder in (("TMPDIR", temporary), ("HOME", environ.get("HOME", ""))):
        if not folder:
            yield Finding(name, "warning", "is not set", f"export {name}=…, a folder of your own")
        elif (why := _why_not_written(Path(folder))) is not None:
            yield Finding(name, "wrong", f"{folder}: {why}", f"export {name}=…, a folder that can be written")
        else:
            yield Finding(name, "ok", folder)


def _why_not_written(folder: Path) -> str | None:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"doctor")
    except OSError as error:
        return f"{error.strerror}".lower()
    return None


def check_hostname(name: str, *, machines: int) -> Finding:
    """Whether this machine's own name leads to an address; gloo and NCCL ask for it.

    Args:
        name: of this machine.
        machines: of the run; one finds itself by `localhost`.
    """
    try:
        address = str(socket.getaddrinfo(name, None)[0][4][0])
    except (OSError, UnicodeError):
        fix = f'echo "127.0.1.1 {name}" | sudo tee -a /etc/hosts   (with several machines: its address in place of it)'
        return Finding("hostname", "warning" if machines == 1 else "wrong", f"{name} leads to no address", fix)
    if machines > 1 and address.startswith("127."):
        fix = f"Let {name} lead to its address in /etc/hosts, or export GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME."
        return Finding("hostname", "warning", f"{name} leads to {address}, which no other machine reaches", fix)
    return Finding("hostname", "ok", f"{name} → {address}")


def check_port(port: int | None) -> Finding:
    """The port that the configuration names, or that a free one can be had."""
    if port:
        if port_is_free(port):
            return Finding("port", "ok", f"{port} is free")
        return Finding(
            "port", "wrong", f"{port} is taken", f"ss -ltnp 'sport = :{port}' says by whom; or name another."
        )
    try:
        with socket.socket() as server:
            server.bind(("localhost", 0))
            return Finding("port", "ok", "a free one is taken at each start")
    except OSError as error:
        fix = "ip link set lo up   (the loopback interface)"
        return Finding("port", "wrong", f"localhost cannot be listened at: {error.strerror}", fix)


def check_nodes(nodes: Mapping[int, frozenset[int]], needs: Needs) -> Finding:
    """Memory that is nearer to some cores than to others.

    Args:
        nodes: cores by NUMA node.
        needs: of the run.
    """
    if len(nodes) < 2:
        return Finding("NUMA", "ok", "one node: all memory is equally near")
    shown = ", ".join(f"{node}: cores {core_ranges(cores)}" for node, cores in nodes.items())
    found = f"{len(nodes)} nodes ({shown})"
    if needs.offloads_to_host and not needs.binds_cores:
        found += "; offload to the CPU works on memory of its own node faster"
        return Finding(
            "NUMA", "warning", found, "Add enable_cpu_affinity: true (zero-plugin launch --enable_cpu_affinity)"
        )
    return Finding("NUMA", "ok", found)


def check_gpus(names: list[str], environ: Mapping[str, str], *, driver: bool, torch_cuda: bool, asked: str) -> Finding:
    """GPUs that torch sees.

    Args:
        names: of the GPUs.
        environ: `CUDA_VISIBLE_DEVICES` may hide them.
        driver: whether a GPU driver is loaded.
        torch_cuda: whether torch is built with CUDA or ROCm.
        asked: what of the configuration asks for GPUs, "" for nothing.
    """
    level: Level = "wrong" if asked else "warning"
    if names:
        return Finding("GPUs", "ok", ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names)))
    if driver and not torch_cuda:
        fix = "pip install torch --index-url https://download.pytorch.org/whl/cu128"
        return Finding("GPUs", level, "a driver is loaded, and torch is a build for the CPU", fix)
    if driver:
        visible = environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None:
            return Finding("GPUs", level, f"none with CUDA_VISIBLE_DEVICES={visible}", "unset CUDA_VISIBLE_DEVICES")
        return Finding("GPUs", level, "a driver is loaded, and torch sees no GPU", "nvidia-smi   (and its advice)")
    if asked:
        return Finding(
            "GPUs", "warning", f"none: the run is on the CPU, although {asked}", "Write use_cpu: true to mean it."
        )
    return Finding("GPUs", "ok", "none; runs are on the CPU")


def check_tpu(seen: str, environ: Mapping[str, str], *, asked: bool) -> Finding:
    """torch_xla's version, and what it would run on.

    Args:
        seen: by what a TPU is seen here, "" for none.
        environ: `PJRT_DEVICE` says what torch_xla runs on.
        asked: whether the configuration asks for a TPU.
    """
    version = installed_version("torch_xla")
    found = f"torch_xla {version}" if version else "torch_xla is not installed"
    chosen = environ.get(PJRT_DEVICE)
    where = seen or (f"{PJRT_DEVICE} is {chosen}" if chosen else "")
    if (asked or seen) and (problem := find_version_problem()):
        message, _, fix = problem.partition(": ")
        return Finding("TPU", "wrong" if asked else "warning", f"{message} ({where or 'none here'})", fix)
    if asked and chosen == "CPU":
        fix = f"unset {PJRT_DEVICE}   (to train on the TPU)"
        return Finding("TPU", "warning", f"{found}; {where}: the TPU path is tried on the CPU", fix)
    if asked and not seen:
        fix = f"{PJRT_DEVICE}=CPU zero-plugin launch …   (tries the path on the CPU)"
        return Finding("TPU", "wrong", f"{found}; there is no TPU here{f', and {where}' if where else ''}", fix)
    return Finding("TPU", "ok", f"{found}; {where}" if where else f"none{f'; {found}' if version else ''}")

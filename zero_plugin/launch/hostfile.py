"""The hosts of a run on several machines, from a hostfile and DeepSpeed's filters, checked before anything starts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from zero_plugin.config.files import nearest_file
from zero_plugin.config.validation import did_you_mean
from zero_plugin.errors import Problem

__all__ = ["Host", "filter_hosts", "read_hostfile"]

_LINE: Final = re.compile(r"(\S+)\s+slots=(\d+)(?:\s+max[-_]slots=\d+)?")
_LEGAL: Final = "Write a line `host slots=GPUS` for each machine."


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: its name for ssh, the slots (GPUs, or processes on a CPU) to use, and where it is written."""

    name: str
    slots: tuple[int, ...]
    where: str


def read_hostfile(file: str) -> tuple[list[Host], list[Problem]]:
    """The hosts of a file in the form `host slots=N`, in their order, and everything that is wrong with it.

    Args:
        file: its path; `#` starts a comment.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        fix = nearest_file(Path(file)) if isinstance(error, FileNotFoundError) else _LEGAL
        return [], [Problem(file, "", f"the hostfile cannot be read: {why}", fix)]
    hosts: dict[str, Host] = {}
    problems = []
    for number, line in enumerate(lines, 1):
        text, where = line.partition("#")[0].strip(), f"{file}:{number}:1"
        found = _LINE.fullmatch(text)
        if not text:
            continue
        if found is None:
            problems.append(Problem(where, "", f"`{text}` is no host with its slots", _LEGAL))
        elif found[2].strip("0") == "":
            problems.append(Problem(where, "", f"{found[1]} has no slots", "Write 1 or more, or delete the line."))
        elif found[1] in hosts:
            message = f"{found[1]} is there already, at {hosts[found[1]].where}"
            problems.append(Problem(where, "", message, "Write each host once, with all its slots."))
        else:
            hosts[found[1]] = Host(found[1], tuple(range(int(found[2]))), where)
    if not hosts and not problems:
        problems.append(Problem(file, "", "the hostfile names no host", _LEGAL))
    return list(hosts.values()), problems


def filter_hosts(
    hosts: list[Host], text: str, *, exclude: bool, where: str, key: str
) -> tuple[list[Host], list[Problem]]:
    """What `host@host:SLOT,SLOT` leaves of `hosts`, in their order, and what is wrong with it.

    Args:
        hosts: as the hostfile has them.
        text: the filter; a host without slots means all of its slots.
        exclude: whether the filter names what to leave out.
        where, key: where the filter is written, and its key.
    """
    named: dict[str, set[int]] = {}
    problems = []
    for part, name, slots in _parts(text):
        host = next((host for host in hosts if host.name == name), None)
        if host is None:
            near = did_you_mean(name, [host.name for host in hosts])
            fix = f"Did you mean {near}?" if near else f"Write some of {', '.join(host.name for host in hosts)}."
            problems.append(Problem(where, key, f"{name or 'an empty name'} is no host of the hostfile", fix, text))
        elif slots is None or not slots <= set(host.slots):
            fix = f"Write {name}, or some of its slots: {name}:{','.join(map(str, host.slots))}."
            problems.append(Problem(where, key, f"`{part}`: {name} has no such slots", fix, text))
        else:
            named.setdefault(name, set()).update(slots or host.slots)
    left = []
    for host in hosts:
        chosen = named.get(host.name, set())
        slots_left = tuple(slot for slot in host.slots if (slot in chosen) != exclude)
        if slots_left:
            left.append(Host(host.name, slots_left, host.where))
    if not left and not problems:
        problems.append(Problem(where, key, "leaves no host", "Leave some slot of some host.", text))
    return left, problems


def _parts(text: str) -> Iterator[tuple[str, str, set[int] | None]]:
    """Each part of a filter: as typed, its host, its slots (none for all; None for what is no list of numbers)."""
    for part in text.replace(" ", "").split("@"):
        name, colon, numbers = part.partition(":")
        typed = numbers.split(",") if colon else []
        yield part, name, {int(number) for number in typed} if all(n.isdigit() for n in typed) else None

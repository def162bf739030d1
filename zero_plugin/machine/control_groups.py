"""The control groups that this process is in (a container's, a scheduler's job's), and how Linux writes of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROC: Final = Path("/proc")


@dataclass(frozen=True, slots=True)
class Mount:
    """A line of `mountinfo`: which part of a file system is seen at which folder, its kind and its options."""

    root: str
    folder: str
    kind: str
    options: tuple[str, ...]


def own_groups(controller: str) -> Iterator[Path]:
    """Folders of this process' control groups, of either version, its own first, then those above it.

    A limit of each of them holds for this process.

    Args:
        controller: whose groups, where each controller has its own (version 1), e.g. `memory` or `cpu`.
    """
    own = {}
    for line in read_text(PROC / "self" / "cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        own.update(dict.fromkeys(controllers.split(","), group))
    for mount in read_mounts(PROC / "self" / "mountinfo"):
        name = {"cgroup2": "", "cgroup": controller}.get(mount.kind)
        if name in own and (name == "" or name in mount.options):
            inside = Path(own[name])  # of a container the own group may be mounted as the root
            folder = Path(mount.folder, inside.relative_to(mount.root) if inside.is_relative_to(mount.root) else "")
            yield from (group for group in (folder, *folder.parents) if group.is_relative_to(mount.folder))


def read_mounts(mountinfo: Path) -> Iterator[Mount]:
    """The mounts that a file of the kernel lists, in their order; of two on one folder the later covers the earlier."""
    for line in read_text(mountinfo).splitlines():
        before, _, after = line.partition(" - ")
        root, folder = (word.encode().decode("unicode_escape") for word in before.split()[3:5])
        kind, *_, options = after.split()
        yield Mount(root, folder, kind, tuple(options.split(",")))


def read_numbers(file: Path) -> dict[str, int]:
    """A file of lines `name number`; empty where there is none."""
    words = (line.split() for line in read_text(file).splitlines())
    return {line[0]: int(line[1]) for line in words if len(line) == 2 and line[1].isdigit()}


def read_text(file: Path) -> str:
    """The text without the blanks around it; "" where there is no such file, or it may not be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""

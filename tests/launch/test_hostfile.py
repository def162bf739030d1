"""Hostfiles and filters: the parsed result, and every mistake with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from zero_plugin.errors import MachineError
from zero_plugin.launch.hosts import filter_hosts, read_hostfile, run_on_hosts
from zero_plugin.launch.spec import Host, Hosts


def write(folder: Path, text: str) -> str:
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


def test_hosts_in_their_order(tmp_path: Path) -> None:
    """Comments and empty lines are skipped. Each host keeps its line."""
    file = write(tmp_path, "# two\nnode-2 slots=2\n\nuser@node-1   slots=10  # big\nnode-3 slots=1 max_slots=4\n")
    hosts, problems = read_hostfile(file)
    assert problems == []
    assert [(host.name, len(host.slots), host.where) for host in hosts] == [
        ("node-2", 2, f"{file}:2:1"),
        ("user@node-1", 10, f"{file}:4:1"),
        ("node-3", 1, f"{file}:5:1"),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ["hosts: the hostfile names no host"]),
        ("# a\n", ["names no host"]),
        ("a slots=2\nb\nc slots=x\n", [":2:1: `b` is no host", ":3:1: `c slots=x` is no host"]),
        ("a slots = 2\n", [":1:1: `a slots = 2`"]),
        ("a slots=0\n", [":1:1: a has no slots"]),
        ("a slots=2\na slots=1\n", [":2:1: a is listed already, at", "hosts:1:1"]),
    ],
)
def test_mistakes_in_a_hostfile(text: str, found: list[str], tmp_path: Path) -> None:
    """All mistakes are found by line, with the legal values."""
    _, problems = read_hostfile(write(tmp_path, text))
    told = "\n".join(map(str, problems))
    for part in found:
        assert part in told
    assert all(problem.fix for problem in problems)


def test_a_hostfile_that_is_not_there(tmp_path: Path) -> None:
    """DeepSpeed would continue with this machine alone. Here it is an error that offers a near name."""
    write(tmp_path, "a slots=1\n")
    _, (problem,) = read_hostfile(str(tmp_path / "host"))
    assert "cannot be read: No such file" in problem.message
    assert "Did you mean" in problem.fix
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    _, (problem,) = read_hostfile(str(tmp_path / "bytes"))
    assert "not text" in problem.message


HOSTS = [Host("a", (0, 1), "h:1:1"), Host("b", (0, 1, 2), "h:2:1"), Host("c", (0,), "h:3:1")]


@pytest.mark.parametrize(
    ("text", "exclude", "left"),
    [
        ("a", False, {"a": (0, 1)}),
        ("c@a:1", False, {"a": (1,), "c": (0,)}),
        ("b:2,0", False, {"b": (0, 2)}),
        ("b", True, {"a": (0, 1), "c": (0,)}),
        ("b:0@c", True, {"a": (0, 1), "b": (1, 2)}),
    ],
)
def test_filters(text: str, exclude: bool, left: dict[str, tuple[int, ...]]) -> None:
    """DeepSpeed's notation works, in the order of the hostfile."""
    hosts, problems = filter_hosts(HOSTS, text, exclude=exclude, where="--f", key="f")
    assert problems == []
    assert {host.name: host.slots for host in hosts} == left
    assert list(left) == [host.name for host in hosts]


@pytest.mark.parametrize(
    ("text", "exclude", "part"),
    [
        ("d", False, "d is no host"),
        ("a:2", False, "`a:2`: a has no such slots"),
        ("a:", False, "a has no such slots"),
        ("a:x", True, "a has no such slots"),
        ("a@b@c", True, "leaves no host"),
        ("a@", False, "an empty name"),
    ],
)
def test_mistakes_in_a_filter(text: str, exclude: bool, part: str) -> None:
    """Errors name a host or slot that the file lacks, and a filter that leaves nothing."""
    _, problems = filter_hosts(HOSTS, text, exclude=exclude, where="--f", key="f")
    assert part in "\n".join(map(str, problems))


@pytest.mark.parametrize(
    ("launcher", "programs", "advice"),
    [
        ("pdsh", "pdsh and ssh", "Type `sudo apt-get install pdsh openssh-client`."),
        ("openmpi", "mpirun and ompi_info", "Type `sudo apt-get install openmpi-bin`."),
        ("slurm", "srun and sinfo", "Start this on a machine of the SLURM cluster."),
    ],
)
def test_a_launcher_that_is_not_installed(
    launcher: str, programs: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the missing programs and the fix."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MachineError) as caught:
        run_on_hosts(Hosts(launcher, (), (), "", (), ()))
    assert str(caught.value) == f"{launcher} needs {programs}, which are not installed on this machine. {advice}"

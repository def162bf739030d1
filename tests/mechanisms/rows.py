"""What a row of the table of mechanisms is: a change that takes one mechanism away, and the tests that notice."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Row", "checks", "joint_checks", "parity"]


@dataclass(frozen=True)
class Row:
    """One mechanism taken away.

    Attributes:
        name: the mechanism.
        file: where it is, in the package.
        text: what is taken away; it stands in the file once.
        instead: what is put there.
        tests: node ids of the tests that fail then, each of them.
        says: is in the failure of each, so that they fail for this reason.
        processes: how many processes, beside pytest's own, have to have run the changed file; with 0, pytest's own has.
        seconds: after which the tests are ended.
    """

    name: str
    file: str
    text: str
    instead: str
    tests: tuple[str, ...]
    says: str
    processes: int = 2
    seconds: float = 480


def checks(module: str, name: str, *paths: str) -> tuple[str, ...]:
    """Check `name` of tests/strategies/`module`_checks.py on each path."""
    node = "tests/strategies/test_every_path.py::test_check"
    return tuple(f"{node}[{module}-{_world(path)}-{path}-{name}]" for path in paths)


def joint_checks(module: str, name: str, *paths: str) -> tuple[str, ...]:
    """Check `name` of tests/several_models/`module`_checks.py on each path."""
    node = "tests/several_models/test_several_models.py::test_check"
    return tuple(f"{node}[{module}-{_world(path)}-{path}-{name}]" for path in paths)


def parity(name: str, *paths: str) -> tuple[str, ...]:
    """Case `name` of tests/parity/cases.py on each path."""
    return tuple(f"tests/parity/test_parity.py::test_case_equals_plain_torch[cpu-{path}-{name}]" for path in paths)


def _world(path: str) -> int:
    return 1 if path == "single" else 2

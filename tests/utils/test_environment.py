"""Environment variables are set, restored and read as scripts expect."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from zero_plugin.config.choices import parse_flag_from_env, str_to_bool
from zero_plugin.machine.hardware import parse_cores
from zero_plugin.utils.environment import (
    CPUInformation,
    are_libraries_initialized,
    check_cuda_p2p_ib_support,
    clear_environment,
    get_cpu_distributed_information,
    get_driver_version,
    get_gpu_info,
    get_int_from_env,
    parse_choice_from_env,
    patch_environment,
    purge_accelerate_environment,
)


@pytest.mark.parametrize("word", ["y", "Yes", "t", "TRUE", "on", "1"])
def test_words_for_true(word: str) -> None:
    """A true word is 1, or True if a boolean is requested."""
    assert str_to_bool(word) == 1
    assert type(str_to_bool(word)) is int
    assert str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_words_for_false(word: str) -> None:
    """A false word is 0, or False if a boolean is requested."""
    assert str_to_bool(word) == 0
    assert str_to_bool(word, to_bool=True) is False


def test_another_word_is_an_error() -> None:
    """Any other word is an error."""
    with pytest.raises(ValueError, match="invalid truth value 'maybe'"):
        str_to_bool("maybe")


def test_reading_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first variable that is set counts, otherwise the default."""
    monkeypatch.setenv("SECOND", "3")
    monkeypatch.setenv("NEGATIVE", "-2")
    monkeypatch.setenv("FLAG", "yes")
    assert get_int_from_env(["FIRST", "NEGATIVE", "SECOND"], 7) == 3
    assert get_int_from_env(["FIRST"], 7) == 7
    assert parse_flag_from_env("FLAG") is True
    assert parse_flag_from_env("FIRST") is False
    assert parse_flag_from_env("FIRST", default=True) is True
    assert parse_choice_from_env("FLAG") == "yes"
    assert parse_choice_from_env("FIRST") == "no"


def test_patched_variables_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, variables are set, in capitals and as text. Afterwards all are restored, after an error too."""
    monkeypatch.setenv("OLD", "before")
    monkeypatch.delenv("NEW", raising=False)
    with patch_environment(old=1, NEW=True):
        assert (os.environ["OLD"], os.environ["NEW"]) == ("1", "True")
    with pytest.raises(RuntimeError), patch_environment(old=1, NEW=True):
        raise RuntimeError
    assert os.environ["OLD"] == "before"
    assert "NEW" not in os.environ


def test_a_cleared_environment_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside, the environment is empty. Variables set there are gone afterwards."""
    monkeypatch.setenv("OLD", "before")
    before = dict(os.environ)
    with clear_environment():
        assert not os.environ
        os.environ["OLD"], os.environ["NEW"] = "changed", "x"
    assert dict(os.environ) == before


def test_loaded_modules() -> None:
    """Only loaded modules are listed."""
    assert are_libraries_initialized("os", "no_such_module") == ["os"]


def test_a_launcher_is_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's and MPI's variables give this process's place. Without them one process exists."""
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)
        os.environ.update(OMPI_COMM_WORLD_RANK="3", OMPI_COMM_WORLD_SIZE="4", LOCAL_RANK="1", MPI_LOCALNRANKS="2")
        assert get_cpu_distributed_information() == CPUInformation(3, 4, 1, 2)


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a fake `nvidia-smi` that prints the content of files in its folder."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\ncat "{tmp_path}/${{1#--query-gpu=}}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("names", "driver", "supported"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.10", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.40.07", True),
        (["NVIDIA GeForce RTX 4090"], "535.10", True),
        (["NVIDIA H100"] * 2, "535.10", True),
    ],
)
def test_gpus_that_cannot_talk_directly(nvidia_smi: Path, names: list[str], driver: str, supported: bool) -> None:
    """Several RTX 40 need a new driver. One alone, and other GPUs, do not."""
    (nvidia_smi / "name").write_text("\n".join(names) + "\n")
    (nvidia_smi / "driver_version").write_text(f"{driver}\n" * len(names))
    assert get_gpu_info() == (names, len(names))
    assert get_driver_version() == driver
    assert check_cuda_p2p_ib_support() is supported


def test_no_gpus_have_nothing_to_avoid(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without nvidia-smi the answer is yes."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_cuda_p2p_ib_support()


def test_cores_of_a_list() -> None:
    """The kernel's format with ranges and single cores is parsed."""
    assert parse_cores("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cores("\n") == set()


def _change(*, fails: bool = False) -> str:
    os.environ |= {"ACCELERATE_NEW": "1", "ACCELERATE_OLD": "changed", "OTHER": "stays"}
    os.environ.pop("ACCELERATE_GONE")
    if fails:
        raise LookupError
    return "done"


class _Purged:
    def test_one(self) -> str:
        return _change()

    async def test_later(self) -> str:
        return _change()

    @staticmethod
    def test_static() -> str:
        return "static"

    def help(self) -> str:
        return _change()


class _Noted:
    seen: list[str]

    def __init_subclass__(cls, **kwargs: object) -> None:
        cls.seen = [*map(str, kwargs)]


def test_variables_are_as_before_a_decorated_function_or_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate's variables are restored: new ones removed, changed and removed ones reset, also after an error."""
    before = {"ACCELERATE_OLD": "old", "ACCELERATE_GONE": "gone"}

    def left() -> dict[str, str]:
        return {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE_")}

    for name in left():
        monkeypatch.delenv(name)
    for name, value in {**before, "OTHER": ""}.items():
        monkeypatch.setenv(name, value)
    decorated = purge_accelerate_environment(_change)
    assert decorated() == "done"
    assert decorated.__name__ == "_change"
    assert (left(), os.environ["OTHER"]) == (before, "stays")
    with pytest.raises(LookupError):
        decorated(fails=True)
    assert left() == before

    parent = purge_accelerate_environment(type("TestParent", (_Purged,), {}))

    class Child(parent, _Noted, reason=1):  # type: ignore[misc, valid-type]
        def test_two(self) -> str:
            return _change()

    child = Child()
    assert (child.seen, child.test_one(), child.test_two(), child.test_static()) == (
        ["reason"],
        *["done"] * 2,
        "static",
    )
    assert asyncio.run(child.test_later()) == "done"
    assert left() == before
    child.help()
    assert left() == {"ACCELERATE_OLD": "changed", "ACCELERATE_NEW": "1"}
    monkeypatch.delenv("ACCELERATE_NEW")

"""For all answers, the config is right and no settled question is asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hypothesis import given, settings
from hypothesis import strategies as some

from zero_plugin.cli.config import ask_launch_config
from zero_plugin.config.check import find_problems
from zero_plugin.config.commented import config_text
from zero_plugin.config.read import read_document
from zero_plugin.machine.hardware import Machine

T = TypeVar("T")


class AnyAnswers:
    """A person who gives random legal answers and records the questions."""

    def __init__(self, data: some.DataObject) -> None:
        self._data = data
        self.asked: list[str] = []

    def choose(self, question: str, options: Mapping[T, str], default: T) -> T:
        self.asked.append(question)
        assert default in options
        assert len(options) > 1, "a choice of one is no question"
        return self._data.draw(some.sampled_from(list(options)), question)

    def read(self, question: str, parse: Callable[[str], T], default: str = "") -> T:
        self.asked.append(question)
        lines = ["", "0", "1", "2", "6", "0.5", "auto", "all", "0,1", "none", "/a b", "no", "x"]
        lines = [line for line in lines if self._parses(parse, line or default)]
        line = self._data.draw(some.sampled_from(lines), question)
        return parse(line or default)

    def confirm(self, question: str, default: bool) -> bool:
        self.asked.append(question)
        return "DeepSpeed JSON" not in question and self._data.draw(some.booleans(), question)

    @staticmethod
    def _parses(parse: Callable[[str], Any], line: str) -> bool:
        try:
            parse(line)
        except ValueError:
            return False
        return True


@settings(deadline=None)
@given(some.data(), some.integers(0, 8), some.sampled_from(["no", "bf16"]))
def test_every_path_through_the_questions_gives_a_right_config(data: some.DataObject, gpus: int, found: str) -> None:
    """Every path through the questions gives a config without findings. ZeRO questions come only for ZeRO."""
    person = AnyAnswers(data)
    values = ask_launch_config(person, Machine(gpus, cores=8), found)
    document = read_document("written.yaml", content=config_text(values, Path("written.yaml")).encode())
    assert [problem for problem in find_problems(document) if problem.severity != "note"] == []
    assert "scheduler_counts" not in values
    assert len(set(person.asked)) == len(person.asked)
    asked = " ".join(person.asked)
    zero = values["distributed_type"] == "DEEPSPEED"
    stage = values.get("deepspeed_config", {}).get("zero_stage")
    assert ("ZeRO stage" in asked) is zero
    assert ("offload weights" in asked) is (stage == 3)
    assert ("offload optimizer" in asked) is (stage in (1, 2, 3))
    offloads = {name for name in values.get("deepspeed_config", {}) if name.startswith("offload_")}
    assert stage != "auto" or offloads == {"offload_optimizer_device", "offload_param_device"}
    assert ("Address of machine 0" in asked) <= (values.get("num_machines", 1) > 1)
    assert ("GPUs of each machine" in asked) is ("use_cpu" not in values and values["distributed_type"] != "XLA")

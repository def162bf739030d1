"""Roles of processes: main process first, work split among processes, and log lines."""

import json
import logging
import sys
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, gather_object, set_seed
from torch import nn

logger = get_logger(__name__, log_level="INFO")


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(output: str) -> None:
    handler = Lines()
    logger.logger.addHandler(handler)
    state = PartialState(cpu=True)
    prepared = Path(output).with_name("prepared.txt")
    seen = []
    with state.main_process_first():
        seen.append(prepared.exists())
        if state.is_main_process:
            prepared.write_text("once")
    accelerator = Accelerator(cpu=True)
    with accelerator.local_main_process_first():
        assert prepared.read_text() == "once"
    first = gather_object(seen)

    set_seed(21)
    model = accelerator.prepare(nn.Linear(3, 1))
    prompts = [f"prompt {i}" for i in range(7)]
    with accelerator.split_between_processes(prompts, apply_padding=True) as mine:
        padded = gather_object([len(mine)])
    with state.split_between_processes(prompts) as mine:
        inputs = torch.tensor([[len(text), float(text[-1]), 1.0] for text in mine])
        scores = model(inputs).detach().squeeze(1).tolist()
        found = gather_object(list(zip(mine, scores, strict=True)))
    with state.split_between_processes({"a": list(range(5)), "b": torch.arange(5)}) as parts:
        split = gather_object([[parts["a"], parts["b"].tolist()]])

    logger.info("from the main process")
    logger.info("from every process", main_process_only=False)
    logger.info(f"process {state.process_index}", main_process_only=False, in_order=True)
    logger.debug("too quiet")
    logger.warning_once("once")
    logger.warning_once("once")
    lines = gather_object([handler.lines])

    called = []

    @accelerator.on_main_process
    def on_main() -> None:
        called.append("main")

    @accelerator.on_last_process
    def on_last() -> None:
        called.append("last")

    @accelerator.on_process(process_index=0)
    def on_first() -> None:
        called.append("first")

    on_main()
    on_last()
    on_first()
    called = gather_object([called])
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        shared = AcceleratorState()
        results = {
            "losses": [score for _, score in found],
            "rates": [],
            "texts": [text for text, _ in found],
            "first": first,
            "padded": padded,
            "split": split,
            "lines": lines,
            "called": called,
            "processes": [state.num_processes, shared.process_index, shared.is_last_process, shared.device.type],
            "precision": shared.mixed_precision,
            "alone": shared.distributed_type == DistributedType.NO,
        }
        Path(output).write_text(json.dumps(results))
    logger.logger.removeHandler(handler)
    accelerator.end_training()


if __name__ == "__main__":
    main(sys.argv[1])

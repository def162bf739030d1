"""Runs one program on a path in separate processes, which end like its script: JOB FOLDER."""

from __future__ import annotations

import functools
import json
import os
import sys
from pathlib import Path

from device import DEVICE

os.environ["DS_ACCELERATOR"] = DEVICE

import cpuinfo
import torch
from grammar import Program
from packaged import run

from zero_plugin.errors import ZeroPluginError

cpuinfo.get_cpu_info = functools.cache(cpuinfo.get_cpu_info)  # saves a second each time
job, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
program = Program(**job["program"])
file = folder / f"{job['id']}.{os.environ.get('RANK', '0')}.pt"
try:
    state, found = run(program, job["path"], job["part"], Path(job["folder"]))
except ZeroPluginError as error:
    torch.save({"refused": f"{type(error).__name__}: {error}"}, file)
    raise
torch.save(found, file)
if program.ending == "end_training":
    state.accelerator.end_training()
elif program.ending == "exit":
    sys.exit(0)
elif program.ending == "deleted":
    del state, found

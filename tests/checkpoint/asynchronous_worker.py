"""Saves asynchronously and ends without end_training(): STORE RANK WORLD FOLDER HOW, where HOW is `slow` or `full`."""

from __future__ import annotations

import errno
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from zero_plugin import Accelerator
from zero_plugin.config.handlers import InitProcessGroupKwargs

if __name__ == "__main__":
    store, rank, world, folder, how = sys.argv[1:6]
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    group = InitProcessGroupKwargs(init_method=f"file://{store}", timeout=timedelta(seconds=120))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[group])
    net = torch.nn.Linear(100, 100)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(1, 100)).sum())
    optimizer.step()
    real = os.pwrite

    def pwrite(*args: Any) -> int:
        time.sleep(0.2)
        if how == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args)

    os.pwrite = pwrite
    accelerator.save_state(folder, asynchronous=True)
    print("the script has ended", Path(folder).exists(), flush=True)

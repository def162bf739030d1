"""A progress bar that one process of each machine shows."""

from __future__ import annotations

import os
from typing import Any


def tqdm(*args: Any, main_process_only: bool = True, **kwargs: Any) -> Any:
    """Return a `tqdm.auto.tqdm` that only each machine's first process shows.

    Args:
        *args: for tqdm.
        main_process_only: False shows the bars of all processes.
        **kwargs: for tqdm; `disable=True` shows none.

    Raises:
        ValueError: the first argument is a bool; older releases of Accelerate took `main_process_only` there.
    """
    from tqdm.auto import tqdm as bar  # a dependency of DeepSpeed

    if args and isinstance(args[0], bool):
        raise ValueError("tqdm(True, …) is unsupported: write main_process_only=True after the iterable")
    elsewhere = main_process_only and os.environ.get("LOCAL_RANK", "0") != "0"
    return bar(*args, **{**kwargs, "disable": kwargs.get("disable", False) or elsewhere})

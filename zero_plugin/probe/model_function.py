"""Calls a user's function that builds the model to plan for."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_plugin.errors import ConfigError, Problem
from zero_plugin.plan.sample_length import usual_length
from zero_plugin.probe.transformers_model import example_inputs

__all__ = ["call_function"]


def call_function(name: str, sequence_length: int | None) -> tuple[nn.Module, Any]:
    """The module that a function returns, and example inputs: those returned with it, else a transformers model's.

    The function runs under the meta device, so that no weight is allocated, and where it needs values on the CPU.

    Args:
        name: `module:function`; the module is looked for in the current folder too.
        sequence_length: tokens of one sample, for a transformers model; None: `usual_length`.

    Raises:
        ConfigError: there is no such function, it fails, or it returns something else.
    """
    module_name, function_name = name.split(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        try:
            with torch.device("meta"):
                found = function()
        except (RuntimeError, NotImplementedError):  # it looks at a tensor's values
            found = function()
    except Exception as error:  # whatever a user's function raises
        fix = "Name a function without arguments that can be imported here, e.g. train:build_model."
        raise _error(name, f"{type(error).__name__}: {error}", fix) from error
    finally:
        sys.path.remove(here)
    if isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module):
        return found[0], found[1]
    if isinstance(found, nn.Module) and hasattr(found, "main_input_name"):
        return found, example_inputs(found, sequence_length or usual_length(found.config))
    fix = "Return (module, example inputs): a dict of keyword arguments, a tuple of positional ones, or one tensor."
    raise _error(name, f"it returned {type(found).__name__}, which does not tell what the forward takes", fix)


def _error(name: str, message: str, fix: str) -> ConfigError:
    return ConfigError([Problem("plan", "", f"{name}: {message}", fix)])

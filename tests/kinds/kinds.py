"""Kinds of training code, as users write them, each a function of a loop that returns its final weights."""

from __future__ import annotations

import data_kinds
import gradient_kinds
import model_kinds
import optimizer_kinds
import several_kinds
import weight_kinds
from training import Kind

MODULES = (optimizer_kinds, model_kinds, gradient_kinds, weight_kinds, several_kinds, data_kinds)
KINDS: dict[str, Kind] = {name: kind for module in MODULES for name, kind in module.KINDS.items()}
# Kind -> path -> words of the error that says why it cannot be right there, and what to write.
REFUSED: dict[str, dict[str, str]] = {name: paths for module in MODULES for name, paths in module.REFUSED.items()}
# The same for errors that torch itself raises, in a line of the script.
FAILS: dict[str, dict[str, str]] = {name: paths for module in MODULES for name, paths in module.FAILS.items()}

"""Describes how named values differ between the processes."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Final

from zero_plugin.distributed.collectives import gather_values, process_index
from zero_plugin.machine.hardware import number_ranges

SHOWN: Final = 5  # differences in a message; the first one nearly always names the cause


def compare(own: Mapping[str, str]) -> str:
    """Return lines that describe how `own` differs between the processes; "" if it does not. Collective.

    Digests are compared first, so equal values are not sent.
    """
    encoded = json.dumps(own, sort_keys=True)
    digest = hashlib.sha256(encoded.encode()).hexdigest()
    digests, hosts = zip(*gather_values([digest, socket.gethostname()]), strict=True)
    if len(set(digests)) == 1:
        return ""
    sends = digests.index(digest) == process_index()  # one process for all that have the same values
    sent = gather_values(own if sends else None)
    everyone = [sent[digests.index(digest)] for digest in digests]
    lines = [
        f"  {name}: {_ranks_by_value(found, hosts)}"
        for name in dict.fromkeys(name for values in everyone for name in values)
        if len(set(found := [values.get(name, "missing") for values in everyone])) > 1
    ]
    more = [f"  … and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join([*lines[:SHOWN], *more])


def _ranks_by_value(values: Sequence[str], hosts: Sequence[str]) -> str:
    """Return for example `A on ranks 0-2 (host-1, host-2), B on rank 3 (host-3)`."""
    parts = []
    for value in dict.fromkeys(values):
        ranks = [rank for rank, other in enumerate(values) if other == value]
        numbers = number_ranges(set(ranks)).replace(",", ", ")
        where = ", ".join(dict.fromkeys(hosts[rank] for rank in ranks))
        parts.append(f"{value} on rank{'s' if len(ranks) > 1 else ''} {numbers} ({where})")
    return "; ".join(parts)

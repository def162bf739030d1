"""Sequence parallelism: a group of processes computes on the parts of the same samples.

The prepared model takes complete samples, as with one process, and gives complete results; inside of it each process
has its part of every sequence. The functions here are for models that compute attention by themselves; with a group of
one process they do nothing, so that the same model runs without sequence parallelism.
"""

from zero_plugin.sequence_parallel.attention import attention as attention
from zero_plugin.sequence_parallel.group import cut as cut
from zero_plugin.sequence_parallel.group import gather as gather
from zero_plugin.sequence_parallel.group import total as total

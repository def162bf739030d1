"""Training on long sequences: sequence parallelism, and losses and layers in chunks.

With `sequence_parallel_size`, a prepared model takes complete samples and returns complete results, as with one
process. Inside the model each process has its part of every sequence. `attention`, `cut`, `gather`, `total` and
`own_random_numbers` are for models that implement their own attention. With one process the last four do nothing, so
the same model runs without sequence parallelism. `chunk_loss` and `chunk_layer` save memory with any number of
processes.
"""

from zero_plugin.long_context.chunks import chunk_layer as chunk_layer
from zero_plugin.long_context.group import cut as cut
from zero_plugin.long_context.group import gather as gather
from zero_plugin.long_context.group import own_random_numbers as own_random_numbers
from zero_plugin.long_context.group import total as total
from zero_plugin.long_context.transformers_models import chunk_loss as chunk_loss
from zero_plugin.long_context.ulysses import attention as attention

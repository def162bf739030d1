"""`ParallelismConfig`, at the place where scripts import it from Accelerate."""

from zero_plugin.config.parallelism import ParallelismConfig as ParallelismConfig

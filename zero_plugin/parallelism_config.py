"""`ParallelismConfig` under Accelerate's name for its module."""

from zero_plugin.config.parallelism import ParallelismConfig as ParallelismConfig

"""Speed and memory of a recurrence, as ratios against a Transformer measured in the same run."""

from undertow.benchmark.run import bench
from undertow.benchmark.settings import Bench

__all__ = ["Bench", "bench"]

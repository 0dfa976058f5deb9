"""Speed and memory of a recurrence, as ratios against a Transformer measured in the same run."""

from undertow.lab.benchmark.run import bench
from undertow.lab.benchmark.settings import Bench

__all__ = ["Bench", "bench"]

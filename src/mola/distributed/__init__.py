"""Processes that work together: each streams its own shard, and sums are added up. Of factors it knows only that they add up."""

from mola.distributed.sharding import check_sampler, shard
from mola.distributed.team import Team, join

__all__ = ["Team", "check_sampler", "join", "shard"]

"""The parameter plane: trainers push versions to one store per node, instances pull them at their own time (paper §4).

    trainer rank                      relay rank of a node                rollout rank
    Publisher.snapshot(version)
      own shard -> staging
      background thread, piece by ──►  Relay: lands each piece at its
      piece (transports)               offset in a slot of NodeStore ──►  Puller.pull(version_min): slot -> engine

`manifest`, `layout` and `checksum` need no torch. `store` needs it only for `tensors()`.
"""

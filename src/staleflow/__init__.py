"""StaleFlow: asynchronous RL post-training of language models as one SPMD job, with a hard staleness bound."""

__version__ = "0.1.0"

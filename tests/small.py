"""A config of one trainer and three rollout instances: what fits on two small nodes."""

CONFIG = """
[run]
name = "two-nodes"
steps = 4
[model]
path = "models/tiny"
[data]
train = [{ path = "data/train.jsonl" }]
max_prompt_tokens = 64
[staleness]
eta = 2
batch_groups = 4
group_size = 4
[rollout]
instances = 3
max_tokens = 64
max_model_len = 128
"""

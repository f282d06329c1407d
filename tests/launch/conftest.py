import pytest

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


@pytest.fixture
def config_file(tmp_path):
    """A config of one trainer and three rollout instances."""
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path

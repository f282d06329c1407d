import pytest

from tests.small import CONFIG


@pytest.fixture
def config_file(tmp_path):
    """A config of one trainer and three rollout instances."""
    path = tmp_path / "job.toml"
    path.write_text(CONFIG)
    return path

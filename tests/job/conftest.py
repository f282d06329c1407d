from pathlib import Path

import pytest

from staleflow.data import addition
from tests.job.harness import Task


@pytest.fixture(scope="session")
def task(tmp_path_factory: pytest.TempPathFactory) -> Task:
    """The demo's task with its untrained model."""
    root: Path = tmp_path_factory.mktemp("addition")
    addition.main([str(root)])
    return Task(root)

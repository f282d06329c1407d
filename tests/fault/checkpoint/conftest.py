from tests.job.conftest import task

__all__ = ["task"]

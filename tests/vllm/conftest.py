from tests.job.conftest import task  # noqa: F401  (the fixture)

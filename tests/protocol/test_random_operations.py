"""A million random operations, each answer compared with the tests' own account of the run."""

import random

import pytest
from protocol_driver import random_operation, random_pair

from staleflow.protocol import StalenessProtocol

OPERATIONS_PER_SEED = 125_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_a_million_random_operations_agree_with_the_account(seed: int) -> None:
    rng = random.Random(seed)
    done = {"start": 0, "join": 0, "occupy": 0, "release": 0, "consume": 0}
    while sum(done.values()) < OPERATIONS_PER_SEED:
        pair = random_pair(rng)
        for _ in range(2_000):
            name = random_operation(pair, rng)
            if name:
                done[name] += 1
            if rng.random() < 0.03:
                pair.compare()
        pair.protocol.check()
        assert StalenessProtocol.load(pair.protocol.dump()).dump() == pair.protocol.dump()
    assert min(done.values()) > OPERATIONS_PER_SEED / 200, done

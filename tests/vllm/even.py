"""A reward that an untrained model meets about half of the time, so that its weights move."""

from staleflow.rewards.spec import RewardSample


def reward(sample: RewardSample) -> float:
    return float(len(sample.response) % 2 == 0)

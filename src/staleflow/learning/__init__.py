"""Learning: packed batches, advantages, losses, and the FSDP2 policy trainer."""

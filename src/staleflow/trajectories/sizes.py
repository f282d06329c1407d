"""How large a trajectory record is. Apart from `schema`, so that a login node can plan without numpy."""

HEADER_BYTES = 64


def record_bytes(prompt_tokens: int, response_tokens: int, n_segments: int) -> int:
    """Bytes of the record of such a trajectory."""
    return HEADER_BYTES + 4 * (prompt_tokens + 2 * response_tokens) + 8 * n_segments

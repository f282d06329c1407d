"""What the protocol raises."""


class ProtocolError(ValueError):
    """The protocol was misused, or one of its invariants is broken; the state is as it was before the call."""


class NotReady(ProtocolError):
    """`consume()` was called while the trainer's next buffer is PENDING or STUCK."""


class JournalError(RuntimeError):
    """A journal cannot be written, or is not what it has to be: foreign, of another version, damaged, in use."""

"""The global consistency protocol: a staleness bound that always holds, and wastes nothing. See docs/protocol.md.

This package's face is the pure part. Persistence is in `staleflow.protocol.journal` and `staleflow.protocol.recovery`.
"""

from staleflow.protocol.audit import audit
from staleflow.protocol.core import REASONS, StalenessProtocol
from staleflow.protocol.errors import JournalError, NotReady, ProtocolError

__all__ = ["REASONS", "JournalError", "NotReady", "ProtocolError", "StalenessProtocol", "audit"]

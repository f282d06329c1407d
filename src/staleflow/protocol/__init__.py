"""The global consistency protocol: a staleness bound that always holds, and wastes nothing. See docs/protocol.md."""

from staleflow.protocol.audit import audit
from staleflow.protocol.core import REASONS, StalenessProtocol
from staleflow.protocol.errors import NotReady, ProtocolError

__all__ = ["REASONS", "NotReady", "ProtocolError", "StalenessProtocol", "audit"]

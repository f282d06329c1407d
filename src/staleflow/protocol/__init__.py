"""The global consistency protocol: a staleness bound that always holds, and wastes nothing. See docs/protocol.md."""

from staleflow.protocol.core import StalenessProtocol
from staleflow.protocol.errors import NotReady, ProtocolError

__all__ = ["NotReady", "ProtocolError", "StalenessProtocol"]

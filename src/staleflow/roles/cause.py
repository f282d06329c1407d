"""Why a job ends, when the news of one event arrive in any order.

A rank that dies makes its peers fail (their connections break) and its launcher signal everybody. So the death is the
reason, not the failures; and a failure is the reason, not the signals. Weaker news wait `SETTLES_S` for stronger ones.
"""

from __future__ import annotations

from dataclasses import dataclass

SETTLES_S = 1.0  # more than a host needs to notice a death (host.LIVENESS_EVERY_S) and to say so


@dataclass(frozen=True)
class Signalled:
    """A signal that nothing else explains."""

    number: int
    reason: str


class Cause:
    """Collects bad news; `settled` gives each once."""

    def __init__(self) -> None:
        self._failure: tuple[str, float] | None = None
        self._signal: tuple[Signalled, float] | None = None

    def failed(self, reason: str, now_s: float) -> None:
        """A rank has failed, maybe because of another: the first one counts."""
        self._failure = self._failure or (reason, now_s)

    def signalled(self, number: int, reason: str, now_s: float) -> None:
        """A rank got a signal. While one settles, those of other ranks are the same event."""
        self._signal = self._signal or (Signalled(number, reason), now_s)

    def settled(self, now_s: float) -> str | Signalled | None:
        """The reason of a failure, a signal to obey, or None: nothing, or nothing settled yet."""
        if self._failure is not None:
            return self._failure[0] if now_s - self._failure[1] >= SETTLES_S else None
        if self._signal is None or now_s - self._signal[1] < SETTLES_S:
            return None
        signal, self._signal = self._signal[0], None
        return signal

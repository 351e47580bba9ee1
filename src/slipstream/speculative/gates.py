"""The published gates: rules that end speculation for the rest of a request."""

from __future__ import annotations

from slipstream.types import Gate

_FIRST_EMA = 2.0
_EMA_SHARE = 0.5


class EmaGate:
    """Closes when steps stay dearer than the plain steps they replace."""

    def __init__(self, gate: Gate) -> None:
        self.open = True
        self.ema = _FIRST_EMA
        self._gate = gate
        self._steps = 0
        self._low = 0

    def observe(self, committed: int, step_ms: float, plain_ms: float) -> None:
        """One speculative step: what it committed, what it took, and what one plain step takes."""
        if not self.open or step_ms <= 0:
            return
        self._steps += 1
        self.ema += _EMA_SHARE * (committed * plain_ms / step_ms - self.ema)
        if self._steps <= self._gate.warmup:
            return
        self._low = self._low + 1 if self.ema < self._gate.margin else 0
        self.open = self._low < self._gate.sustain


class EntropyGate:
    """Closes when the target itself is unsure of its next token."""

    def __init__(self, gate: Gate) -> None:
        self.open = True
        self._gate = gate
        self._low = 0

    def observe(self, top1: float) -> None:
        """The target's largest probability at the anchor of a step."""
        if not self.open:
            return
        self._low = self._low + 1 if top1 < self._gate.floor else 0
        self.open = self._low < self._gate.patience and top1 >= self._gate.hard

"""Which verify steps wrote new text: small models loop, and a loop is easy to draft, so tau on it flatters."""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 8


def novel_steps(token_ids: Sequence[int], step_sizes: Sequence[int], ngram: int = NGRAM) -> tuple[int, int]:
    """Verify steps whose next `ngram` tokens did not stand in the completion yet, and the tokens they committed.

    `token_ids` is the whole completion, `step_sizes` the tokens each step committed. The first token comes from
    prefill and belongs to no step. A step with fewer than `ngram` tokens left after it began is left out.
    """
    written: set[tuple[int, ...]] = set()
    ends = ngram  # grams ending at or before the current position are in `written`; the next one ends here
    position = 1
    steps = committed = 0
    for size in step_sizes:
        while ends <= position:
            written.add(tuple(token_ids[ends - ngram : ends]))
            ends += 1
        gram = tuple(token_ids[position : position + ngram])
        if len(gram) < ngram:
            break
        if gram not in written:
            steps += 1
            committed += size
        position += size
    return steps, committed

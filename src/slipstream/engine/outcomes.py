"""From the target's choices to what one request takes of a step: tokens, text, the rows that stay, or an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.engine.active_sequence import ActiveSequence
from slipstream.engine.scheduler import PrefillChunk
from slipstream.speculative.accept import NO_TOKEN, accept
from slipstream.speculative.gates import EntropyGate
from slipstream.speculative.sampling import log_probabilities
from slipstream.stats import Decision
from slipstream.types import Proposal, StepRecord, TokenOut, Verdict


class Proposed(NamedTuple):
    """What one sequence verifies in a step, and why."""

    proposal: Proposal
    decision: Decision


@dataclass(slots=True)
class SequenceOutcome:
    """What one step means for one request: the rows that stay, the tokens they lead to and the text to show."""

    sequence: ActiveSequence
    rows: Sequence[int]
    tokens: list[TokenOut] = field(default_factory=list)
    text: str = ""
    step: StepRecord | None = None
    top1: float | None = None  # the target's highest probability after the last row, where a gate reads it


def prefill_outcome(chunk: PrefillChunk[ActiveSequence], chosen: Sequence[int], logits: Tensor) -> SequenceOutcome:
    """Prompt rows always stay; the last chunk of a prompt brings the first token."""
    sequence, rows = chunk.sequence, range(chunk.stop - chunk.start)
    if not chosen:
        return SequenceOutcome(sequence, rows)
    sequence.note_first_token()
    if chosen[0] == NO_TOKEN:
        return SequenceOutcome(sequence, rows, text=_fail(sequence))
    tokens = _token_outs(sequence, chosen, 0, logits, [0])
    _, text = sequence.absorb(tokens)
    return SequenceOutcome(sequence, rows, tokens, text)


def decode_outcome(
    sequence: ActiveSequence,
    proposed: Proposed,
    chosen: list[int],
    logits: Tensor | None,
    draft_s: float,
    verify_s: float,
) -> SequenceOutcome:
    """Walks the proposal along the target's choices; `logits` may be None where the request asks for none of them."""
    verdict = accept(proposed.proposal, chosen)
    if NO_TOKEN in chosen and sequence.sampler.failure is None:
        sequence.state.spoiled = True
        if proposed.proposal.nodes:
            return _void_outcome(sequence, proposed.proposal)
    tokens = _token_outs(sequence, verdict.tokens, verdict.accepted, logits, verdict.path)
    outcome = taken_outcome(sequence, proposed, verdict, tokens, draft_s, verify_s)
    if isinstance(sequence.gate, EntropyGate) and not verdict.failed and logits is not None:
        outcome.top1 = float(logits[verdict.path[-1]].softmax(dim=-1).amax())
    return outcome


def taken_outcome(
    sequence: ActiveSequence,
    proposed: Proposed,
    verdict: Verdict,
    tokens: list[TokenOut],
    draft_s: float,
    verify_s: float,
) -> SequenceOutcome:
    """What a request takes of a verified step: all of it, unless a token ends the request."""
    taken, text = sequence.absorb(tokens)
    step = StepRecord(
        sequence.state.length, proposed.proposal, verdict, proposed.decision, draft_s * 1e3, verify_s * 1e3
    )
    sequence.record_step(step, taken)
    if verdict.failed and sequence.finish_reason is None:
        text += _fail(sequence)
    # The anchor's row stays, and those of all new tokens but the last, which is the next anchor (none after a failure).
    return SequenceOutcome(sequence, verdict.path[: taken + verdict.failed], tokens[:taken], text, step)


def _void_outcome(sequence: ActiveSequence, proposal: Proposal) -> SequenceOutcome:
    """Keeps no row of a step in which a drafted row's logits are not finite, and makes the next step plain.

    That row may have spoiled the other rows.
    """
    sequence.state.clear_ahead(len(proposal.tokens))
    sequence.next_step_plain = True
    sequence.note_bad_draft("the target's numbers for a drafted token are not finite; the next step runs plain")
    return SequenceOutcome(sequence, [])


def _fail(sequence: ActiveSequence) -> str:
    """Ends a request that has no next token; returns the text that was held back."""
    if sequence.sampler.failure is not None:
        return sequence.fail(sequence.sampler.failure)
    sequence.state.spoiled = True
    return sequence.fail(
        "the target produced logits that are not numbers (NaN or infinity): the model file is damaged or its "
        "values overflow in this format; try --dtype fp32"
    )


def _token_outs(
    sequence: ActiveSequence, tokens: Sequence[int], drafted: int, logits: Tensor | None, rows: Sequence[int]
) -> list[TokenOut]:
    """Tokens as they are reported; each was chosen after the row in the same place of `rows`."""
    top = sequence.request.sampling.logprobs
    if top is None or logits is None or not tokens:
        return [TokenOut(token, index < drafted) for index, token in enumerate(tokens)]
    logprobs, values, ids = (
        part.tolist() for part in log_probabilities(logits[list(rows[: len(tokens)])], torch.tensor(tokens), top)
    )
    return [
        TokenOut(token, i < drafted, logprobs[i], tuple(zip(ids[i], values[i], strict=True)))
        for i, token in enumerate(tokens)
    ]

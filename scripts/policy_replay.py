"""Replays recorded drafts under the adaptive policy, in seconds and without the noise of a clock.

    python scripts/policy_replay.py record FILE [--prompts 10] [--tokens 160]
    python scripts/policy_replay.py replay FILE [--without-text] [--set NAME=VALUE ...]

`record` lets the default pair answer every prompt set plainly and drafts at every position. `replay` decides about
these drafts with the real policy; times come from the cost table below, with noise in what the policy is told. It
prints, for each set, the speed over plain decoding of the best fixed number of nodes and of `auto`. `--set` changes a
constant of the policy, to see what it is worth.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from slipstream.bench.workloads import BUILT_IN, read_prompts
from slipstream.engine.llm import LLM
from slipstream.kernels.rows import TREE
from slipstream.speculative import choose, estimate, policy, suffix_index, text_drafts
from slipstream.speculative.candidates import BlockDrafts
from slipstream.speculative.costs import CostTable, StepShape
from slipstream.speculative.draft import DraftJob
from slipstream.speculative.suffix_index import text_index
from slipstream.speculative.tree import Growth
from slipstream.stats import Decision
from slipstream.types import Gate, Mode, Proposal, Source, Verdict

# Milliseconds of the default pair on two cores of an AMD EPYC, when nothing else ran; drafts by slots.
STEPS = {
    1: 2.52,
    2: 2.75,
    3: 2.82,
    4: 2.9,
    5: 3.05,
    6: 3.15,
    7: 3.6,
    8: 3.75,
    9: 4.4,
    12: 4.8,
    13: 5.5,
    16: 5.8,
    24: 8.4,
    32: 10.4,
    64: 20.0,
}
DRAFTS = {3: 1.47, 5: 1.54, 7: 1.68, 15: 2.11}
GROW_MS, CHOOSE_MS, TEXT_MS = 0.12, 0.13, 0.02  # what the host takes for a draft, for a choice, and for a text's index
BRANCHING = 1.05  # trees that branch take this many times as long as chains
NOISE, SLOW_SHARE, SLOW = 0.04, 0.02, 2.5  # deviations of timings, and how often a timing is how many times too long
WIDTHS = (0, 3, 5, 7, 9, 11, 15)  # nodes of the fixed shapes
PROPOSALS, MOST_NODES, LEAST_CLAIM = 15, 63, 0.002
SEEDS = 3
TRUE_COSTS = CostTable(STEPS, DRAFTS)


@dataclass(frozen=True)
class Answer:
    """One recorded answer: the drafts at each of its positions, as trees with the drafter's own claims."""

    name: str
    sampled: bool
    prompt: list[int]
    tokens: list[int]
    drafts: list[Growth | None]

    def draft(self, position: int) -> Growth | None:
        return self.drafts[position] if position < len(self.drafts) else None


class Recorder(policy.Policy):
    """Drafts the whole block at every position and verifies nothing of it."""

    def plan_drafts(self, views: Sequence[choose.View], rest: policy.Rest = policy.ALONE) -> list[int]:
        for view in views:
            view.policy.slots = max(0, min(view.policy.deepest, view.room - 1))
        return [view.policy.slots for view in views]

    def choose(self, offers: Sequence[choose.Offer], rest: policy.Rest = policy.ALONE) -> list[policy.VerifyChoice]:
        return [policy.VerifyChoice("plain", 0, Decision("plain"))] * len(offers)


def record(prompts: int, tokens: int) -> list[Answer]:
    llm, seen = LLM(), list[Growth | None]()
    draft = llm.engine.contexts.draft
    llm.engine.proposer.policy = Recorder(TRUE_COSTS)

    def recorded(jobs: Sequence[DraftJob]) -> list[BlockDrafts | None]:
        blocks = draft(jobs)
        for job, block in zip(jobs, blocks, strict=True):
            anchor = job.state.tokens[job.state.length]
            grown = block.grow(anchor, TREE, MOST_NODES, block.slots, floor=LEAST_CLAIM) if block is not None else None
            seen.append(grown)
        return blocks

    llm.engine.contexts.draft = recorded  # type: ignore[method-assign]
    answers = []
    for name in BUILT_IN:
        for temperature in (0.0, 0.8):
            for conversation in read_prompts(name, prompts):
                messages: list[dict[str, object]] = []
                for question in conversation:
                    messages.append({"role": "user", "content": question})
                    seen.clear()
                    said = llm.chat(messages, mode="auto", max_tokens=tokens, temperature=temperature, seed=1)
                    ids = llm.prompt_ids(messages, chat=True)
                    answers.append(Answer(name, temperature > 0, ids, said.token_ids, list(seen)))
                    messages.append({"role": "assistant", "content": said.text})
            print(f"{name}, T {temperature}: {len(answers)} answers so far", flush=True)
    return answers


def step_ms(rows: int, branching: bool) -> float:
    return TRUE_COSTS.step_ms(StepShape(1, rows, 0, False, False)) * (BRANCHING if branching else 1.0)


def accepted(proposal: Proposal, answer: Answer, position: int) -> tuple[int, ...]:
    """The rows of a proposal that agree with the answer after a position."""
    path, children = (
        [0],
        {
            (parent, token): row
            for row, (parent, token) in enumerate(zip(proposal.parents, proposal.tokens, strict=True))
        },
    )
    for token in answer.tokens[position + 1 :]:
        row = children.get((path[-1], token))
        if row is None:
            break
        path.append(row)
    return tuple(path)


def fixed_ms(answer: Answer, nodes: int) -> float:
    """The time of an answer if every step verifies so many nodes."""
    position, ms = 0, 0.0
    while position + 1 < len(answer.tokens):
        draft = answer.draft(position)
        if not nodes or draft is None:
            ms, position = ms + step_ms(1, False), position + 1
            continue
        proposal = draft.proposal(min(nodes, draft.nodes))
        ms += (
            TRUE_COSTS.draft_ms(1, min(nodes, PROPOSALS), 0) + GROW_MS + step_ms(1 + proposal.nodes, proposal.branching)
        )
        position += len(accepted(proposal, answer, position))
    return ms


def auto_ms(answer: Answer, deciding: policy.Policy, rng: random.Random, text: bool) -> float:
    """The time of an answer if the policy decides about every step."""
    own = deciding.sequence(Mode("auto"), Gate("auto"), PROPOSALS, answer.sampled)
    index, position, ms = text_index(), 0, 0.0
    index.extend([*answer.prompt, *answer.tokens[:1]])
    while position + 1 < len(answer.tokens):
        room = len(answer.tokens) - position - 1
        index.extend(answer.tokens[index.length - len(answer.prompt) : position + 1])
        found = None
        if text and room > 1:
            found = index.grow(text_drafts.MOST_TEXT_NODES, room - 1, own.estimate, own.floor, own.first_from_text)
        offered = found.survivals[1:] if found is not None else ()
        view = choose.View(own, index.length, answer.sampled, room, offered)
        slots, draft = deciding.plan_drafts([view])[0], answer.draft(position)
        if draft is None:
            slots = own.slots = 0
        growth = found or Growth([answer.tokens[position]])
        if slots and draft is not None:
            growth = _regrown(draft, own, slots, 0.0 if own.trial else own.floor)
            growth = text_drafts.merged(growth, found, own.estimate.chance, MOST_NODES) if found is not None else growth
        offer = choose.Offer(own, view.context, answer.sampled, growth.survivals[1:], growth.straight)
        proposal = growth.proposal(deciding.choose([offer])[0].nodes)
        path = accepted(proposal, answer, position)
        step = step_ms(1 + proposal.nodes, proposal.branching)
        spent = (TEXT_MS if text else 0.0) + (TRUE_COSTS.draft_ms(1, slots, 0) + GROW_MS + CHOOSE_MS if slots else 0.0)
        ms += step + spent
        if proposal.nodes:
            own.learn(proposal, Verdict(path, tuple(answer.tokens[position + 1 : position + 1 + len(path)])))
        elif slots:
            own.draft_was_useless()
        told = step * _noise(rng)
        deciding.costs.observe_step(
            StepShape(1, 1 + proposal.nodes, view.context, answer.sampled, proposal.branching), told
        )
        if slots:
            deciding.costs.observe_draft(1, slots, view.context, spent * _noise(rng))
        deciding.progress(len(path), told + spent)
        position += len(path)
    return ms


def _noise(rng: random.Random) -> float:
    return rng.lognormvariate(0.0, NOISE) * (SLOW if rng.random() < SLOW_SHARE else 1.0)


def _regrown(draft: Growth, own: policy.SequencePolicy, slots: int, floor: float) -> Growth:
    """The recorded nodes as the policy would grow them: cut to its slots, in the order of their estimated survival."""
    grown = Growth(draft.tokens[:1])
    rows, last = {0: 0}, dict[int, float]()
    for row in range(1, len(draft.tokens)):
        above = rows.get(draft.parents[row])
        if above is None or draft.depths[row] > slots:
            continue
        survival = grown.survivals[above] * own.estimate.chance(draft.claims[row], draft.depths[row])
        survival = last[above] = min(survival, last.get(above, 1.0))
        if survival >= floor:
            rows[row] = grown.add(above, draft.tokens[row], draft.claims[row], survival)
    grown.sources = [Source.DRAFTER] * len(grown.tokens)
    return text_drafts.ordered(grown)


def replay(answers: Sequence[Answer], text: bool, quiet: bool) -> float:
    """Prints the speeds of each set; returns the mean over all sets of `auto` beside the best fixed shape."""
    sets = sorted({(answer.name, answer.sampled) for answer in answers})
    groups = {kind: [each for each in answers if (each.name, each.sampled) == kind] for kind in sets}
    auto = dict.fromkeys(sets, 0.0)
    for seed in range(SEEDS):
        rng, deciding = random.Random(seed), policy.Policy(CostTable(STEPS, DRAFTS))
        for kind in rng.sample(sets, len(sets)):
            auto[kind] += sum(auto_ms(answer, deciding, rng, text) for answer in groups[kind]) / SEEDS
    ratios = []
    for kind in sets:
        fixed = {nodes: sum(fixed_ms(answer, nodes) for answer in groups[kind]) for nodes in WIDTHS}
        best = min(fixed, key=fixed.__getitem__)
        ratios.append(fixed[best] / auto[kind])
        if not quiet:
            how = "T 0.8" if kind[1] else "greedy"
            print(
                f"{kind[0]:10} {how:6} best fixed: {best:2} nodes, {fixed[0] / fixed[best]:.3f} of plain; "
                f"auto {fixed[0] / auto[kind]:.3f}; auto over best {ratios[-1]:.3f}"
            )
    print(f"auto over the best fixed shape: {fmean(ratios):.4f} in the mean, {min(ratios):.4f} in the worst set")
    return fmean(ratios)


def change(setting: str) -> None:
    """Sets a constant of the policy, given as NAME=VALUE, where VALUE is JSON."""
    name, _, value = setting.partition("=")
    owners = [module for module in (policy, estimate, choose, text_drafts, suffix_index) if hasattr(module, name)]
    if not owners:
        raise SystemExit(f"error: the policy has no constant '{name}'")
    found = json.loads(value)
    for owner in owners:
        setattr(owner, name, tuple(found) if isinstance(found, list) else found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("record", "replay"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--without-text", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--quiet", action="store_true")
    options = parser.parse_args()
    if options.what == "record":
        options.file.write_bytes(pickle.dumps(record(options.prompts, options.tokens)))
        return
    for setting in options.set:
        change(setting)
    replay(pickle.loads(options.file.read_bytes()), not options.without_text, options.quiet)


if __name__ == "__main__":
    main()

"""Says what drafts from the text itself are worth, without any drafter: answers are replayed step by step.

python scripts/suffix_replay.py --prompts editing,prose --limit 24 --max-tokens 192 --nodes 15

The target answers every turn once, greedily. Then each step of an answer proposes what the index finds in the text so
far and commits the proposals that the answer confirms, and one token more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream import LLM
from slipstream.bench.workloads import BUILT_IN, read_prompts
from slipstream.errors import SlipstreamError
from slipstream.speculative.suffix_index import LONGEST_MATCH, SuffixIndex
from slipstream.speculative.tree import Growth

# The shortest match of each line of the tables; the last line holds the matches that are not measured further.
MATCHES = (0, 1, 2, 3, 4, 6, 8, 16, LONGEST_MATCH)


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """What one step proposed and how many tokens it committed."""

    drafts: Growth
    path: list[int]  # the accepted rows
    committed: int
    match: int  # how many tokens of the text's end the best occurrence shares


def replay(prompt: Sequence[int], answer: Sequence[int], nodes: int, depth: int) -> Iterator[ReplayedStep]:
    """The steps that write the answer; as in the engine, the prompt's own pass has written its first token."""
    index = SuffixIndex()
    index.extend([*prompt, *answer[:1]])
    while (done := index.length - len(prompt)) < len(answer):
        drafts = index.grow(nodes, depth)
        children = dict(zip(zip(drafts.parents, drafts.tokens, strict=True), range(drafts.nodes + 1), strict=True))
        path, row = list[int](), 0
        for token in answer[done:-1]:
            if (row := children.get((row, token), 0)) == 0:
                break
            path.append(row)
        committed = len(path) + 1
        yield ReplayedStep(drafts, path, committed, max((match for match, _ in index.occurrences()), default=0))
        index.extend(answer[done : done + committed])


def answers(llm: LLM, name: str, limit: int, max_tokens: int) -> Iterator[tuple[list[int], list[int]]]:
    """The token ids of every turn's prompt and of the target's answer to it."""
    for conversation in read_prompts(name, limit):
        messages: list[dict[str, str]] = []
        for turn in conversation:
            messages.append({"role": "user", "content": turn})
            prompt = llm.prompt_ids(messages, chat=True)
            done = llm.run([llm.request(prompt, max_tokens=max_tokens)])[0]
            messages.append({"role": "assistant", "content": done.text})
            yield prompt, done.token_ids


def line_of(match: int) -> int:
    return max(least for least in MATCHES if least <= match)


def by_match(steps: Sequence[ReplayedStep]) -> list[str]:
    """A table: how often the best match was so long, whether a first token was accepted, and what was committed."""
    lines = ["| match | steps | first token accepted | committed a step |", "| --- | --- | --- | --- |"]
    for least in MATCHES:
        here = [step for step in steps if line_of(step.match) == least]
        if here:
            first, committed = (
                sum(values) / len(here) for values in ([bool(s.path) for s in here], [s.committed for s in here])
            )
            lines.append(f"| {least} | {len(here)} | {first:.2f} | {committed:.2f} |")
    return lines


def judged(step: ReplayedStep) -> Iterator[tuple[int, bool]]:
    """The rows after an accepted parent, and whether they were accepted themselves."""
    reached = {0, *step.path}
    for row in range(1, step.drafts.nodes + 1):
        if step.drafts.parents[row] in reached:
            yield row, row in reached


def by_claim(steps: Sequence[ReplayedStep]) -> list[str]:
    """A table: what nodes after an accepted parent claimed, and how many were accepted."""
    bins: dict[int, list[tuple[float, bool]]] = {}
    for step in steps:
        for row, accepted in judged(step):
            claim = step.drafts.claims[row]
            bins.setdefault(int(10 * claim), []).append((claim, accepted))
    lines = ["| nodes | claimed | accepted |", "| --- | --- | --- |"]
    for _, here in sorted(bins.items()):
        claimed, accepted = (sum(column) / len(here) for column in zip(*here, strict=True))
        lines.append(f"| {len(here)} | {claimed:.2f} | {accepted:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=",".join(BUILT_IN), help="prompt sets or .jsonl files")
    parser.add_argument("--limit", type=int, default=24, help="prompts of each set; 0 uses all")
    parser.add_argument("--max-tokens", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--nodes", type=int, default=15, help="proposed tokens a step")
    parser.add_argument("--depth", type=int, default=15, help="depth of the deepest proposed token")
    options = parser.parse_args()
    try:
        llm, everything = LLM(), list[ReplayedStep]()
        for name in options.prompts.split(","):
            written = answers(llm, name, options.limit, options.max_tokens)
            steps = [step for prompt, ids in written for step in replay(prompt, ids, options.nodes, options.depth)]
            tau = sum(step.committed for step in steps) / len(steps)
            print(f"\n{name}: {len(steps)} steps, {tau:.2f} tokens a step\n", *by_match(steps), sep="\n")
            everything += steps
        print("\nall sets, by claim\n", *by_claim(everything), sep="\n")
    except SlipstreamError as error:
        sys.exit(f"suffix_replay: {error}")


if __name__ == "__main__":
    main()

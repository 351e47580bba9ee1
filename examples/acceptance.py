"""Prints for each place in a draft how often it was verified and how often it was accepted.

python examples/acceptance.py

With a sound pair the share falls slowly from place to place. A pair with a fault still writes the right text, but even
the first drafted token is often rejected, and this table shows that.
"""

from collections import Counter

from slipstream import LLM

PROMPTS = ["Write a Python function that reverses a string.", "What is 12 times 12? Think step by step."]

llm = LLM("smollm2")
verified: Counter[int] = Counter()
accepted: Counter[int] = Counter()
for prompt in PROMPTS:
    for event in llm.stream(prompt, chat=True, max_tokens=48, mode="chain:8"):
        if event.step is None:  # the prompt's own pass proposes nothing
            continue
        for place in range(1, event.step.proposal.depth + 1):
            verified[place] += 1
            accepted[place] += place <= event.step.verdict.accepted

print("place  verified  accepted")
for place in sorted(verified):
    share = accepted[place] / verified[place]
    print(f"{place:5}  {verified[place]:8}  {share:8.0%}  {'#' * round(20 * share)}")

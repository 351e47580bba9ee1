"""Answers one question twice, with and without speculation, and shows that the text is the same.

python examples/generate.py
"""

from slipstream import LLM

QUESTION = "Write a Python function that tells whether a number is prime."

llm = LLM("smollm2")  # fetches the target at the first run; the drafter is part of the package
fast = llm.generate(QUESTION, chat=True, max_tokens=80, mode="chain")
plain = llm.generate(QUESTION, chat=True, max_tokens=80, mode="plain")

print(fast.text)
print(f"the same text as plain decoding: {fast.text == plain.text}")
# tau is the number of tokens that one pass through the target commits on average; plain decoding commits one.
print(f"target passes: {fast.stats.steps} instead of {plain.stats.steps}, tau {fast.stats.tau:.2f}")

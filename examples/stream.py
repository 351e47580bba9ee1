"""Prints an answer while it is written; brackets show the text of steps in which drafted tokens were accepted.

python examples/stream.py
"""

from slipstream import LLM

MESSAGES = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Write a Python function that adds two numbers."},
]

llm = LLM("smollm2")
# An event is what one step of the engine adds to the answer. The last event carries the numbers of the whole request.
for event in llm.stream(MESSAGES, max_tokens=64, mode="chain:8", seed=7, temperature=0.5):
    drafted = sum(token.drafted for token in event.tokens)
    print(f"[{event.text}]" if drafted else event.text, end="", flush=True)
    if event.stats is not None:
        stats = event.stats
        print(f"\n{stats.accepted} of {stats.drafted} drafted tokens were accepted ({stats.accept_rate:.0%})")
        print(f"{stats.completion_tokens} tokens, tau {stats.tau:.2f}, finish reason {event.finish_reason}")

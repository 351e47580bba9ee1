"""Runs requests with different settings in one batch: one pass through the target serves all of them per step.

python examples/batch.py
"""

from slipstream import LLM

# Each request has its own sampling, its own way to speculate, and its own end.
REQUESTS: list[tuple[str, dict[str, object]]] = [
    ("Name three colours.", {"mode": "plain", "max_tokens": 24}),
    ("Count from one to ten.", {"mode": "tree:16", "max_tokens": 40}),
    ("Write a haiku about rain.", {"mode": "auto", "temperature": 0.8, "seed": 7, "max_tokens": 32}),
    ("List the days of the week.", {"mode": "chain:4", "stop": "Thursday", "max_tokens": 48}),
]

llm = LLM("smollm2")
requests = [llm.request(llm.prompt_ids(prompt, chat=True), **settings) for prompt, settings in REQUESTS]
for (prompt, settings), answer in zip(REQUESTS, llm.run(requests), strict=True):
    print(f"--- {prompt} ({settings['mode']}, tau {answer.stats.tau:.2f}, finish reason {answer.finish_reason})")
    print(answer.text.strip())

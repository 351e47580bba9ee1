"""Asks a running server with OpenAI's client: a stream, its speculation chosen by the request, and its timings.

slipstream serve smollm2 &
python examples/openai_client.py [http://127.0.0.1:8080]

The client is a package of its own: pip install openai
"""

import sys

from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{url}/v1", api_key="none")  # the key matters only if the server was started with one
stream = client.chat.completions.create(
    model="any",  # the model that the server used last; this server has only one
    messages=[{"role": "user", "content": "What is a page table?"}],
    max_tokens=32,
    stream=True,
    extra_body={"speculative": {"mode": "tree", "budget": 16}},  # a field that only this server knows
)
timings = None
for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
    timings = getattr(chunk, "timings", None) or timings  # the last chunk carries it
if timings:
    print(f"\n{timings['predicted_n']} tokens, mode {timings['mode']}, tau {timings['tau']:.2f}")

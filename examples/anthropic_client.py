"""Asks a running server with Anthropic's client: a message and a call of a tool.

slipstream serve smollm2 &
python examples/anthropic_client.py [http://127.0.0.1:8080]

The client is a package of its own: pip install anthropic
"""

import sys

from anthropic import Anthropic

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = Anthropic(base_url=url, api_key="none")  # the key matters only if the server was started with one
message = client.messages.create(
    model="any",  # the model that the server used last; this server has only one
    max_tokens=32,
    system="You are brief.",
    messages=[{"role": "user", "content": "What is a page table?"}],
)
for block in message.content:
    if block.type == "text":
        print(block.text)
print(f"{message.usage.output_tokens} tokens, stop reason {message.stop_reason}")

# The arguments of a call always fit the tool's schema, because decoding is held to it. This server runs no tools.
message = client.messages.create(
    model="any",
    max_tokens=48,
    messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    tools=[
        {
            "name": "get_weather",
            "description": "The weather in a city",
            "input_schema": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "maxLength": 20},
                    "unit": {"enum": ["celsius", "fahrenheit"]},
                },
                "required": ["city", "unit"],
                "additionalProperties": False,
            },
        }
    ],
    tool_choice={"type": "tool", "name": "get_weather"},
)
for block in message.content:
    if block.type == "tool_use":
        print(f"{block.name}({block.input})")

"""Constrains an answer to a JSON schema; the text is what plain decoding writes under the same constraint.

python examples/json_schema.py
"""

import json

from slipstream import LLM
from slipstream.grammar.notations import json_schema

BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "year": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "genre": {"enum": ["novel", "poem", "play"]},
    },
    "required": ["title", "year", "genre"],
    "additionalProperties": False,
}

llm = LLM("smollm2")
answer = llm.generate("Describe a famous book as JSON.", chat=True, max_tokens=80, constraint=json_schema(BOOK))
book = json.loads(answer.text)  # it fails only if max_tokens ended the answer: see finish_reason
print(f"{book['title']} ({book['year']}), a {book['genre']}")
print(f"finish reason {answer.finish_reason}, {answer.stats.accepted} drafted tokens accepted")

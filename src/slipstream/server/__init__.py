"""The HTTP server: OpenAI's and Anthropic's APIs over the engine, a router over models, metrics and a web page.

It has three rooms: `apis` is what clients speak, `serving` turns jobs into answers, and `operations` keeps the process
running and observable. `app` and `lifecycle` put the rooms together.
"""

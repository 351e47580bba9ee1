"""The HTTP server: OpenAI's and Anthropic's APIs over the engine, a router over models, metrics and a web page.

Of its three packages, `apis` translates between HTTP and jobs, `serving` turns jobs into answers, and `operations`
keeps the process running and observable. `app` and `lifecycle` put them together.
"""

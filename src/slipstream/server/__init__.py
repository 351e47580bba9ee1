"""The HTTP server: OpenAI's and Anthropic's APIs over the engine, a router over models, metrics and a web page."""

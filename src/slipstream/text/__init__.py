"""Everything between text and token ids: tokenizers, streaming detokenisation, chat templates and stop strings."""

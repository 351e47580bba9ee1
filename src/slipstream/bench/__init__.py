"""This package measures plain decoding, speculation and llama.cpp on the same prompts."""

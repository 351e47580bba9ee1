"""Measurements: plain decoding against speculation over a file of prompts."""

"""Drafting, sampling and accepting: the algorithms of speculation, pure where they can be."""

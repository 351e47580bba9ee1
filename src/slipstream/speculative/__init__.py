"""Drafting, sampling and accepting: the algorithms of speculation, as pure functions where possible."""

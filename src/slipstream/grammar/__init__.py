"""Grammars that constrain a request's text: notations, trials, masks, and the processes that run llguidance."""

"""Constraints on what a request may write: notations, compilation in helper processes, and the masks of each step."""

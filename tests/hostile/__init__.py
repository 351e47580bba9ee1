"""Tests of what a hostile client can send, and of what this may cost other clients."""

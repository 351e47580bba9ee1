"""What a hostile client can send, and what it may cost others."""

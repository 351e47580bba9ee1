"""What runs a server: its settings, limits and connections, its errors, its log, its metrics and its recordings."""

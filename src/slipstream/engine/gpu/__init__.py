"""The engine on a GPU: device state, whole steps as captured graphs, and the loop that keeps one in flight."""

"""Tools around model files and servers: inspect, check, convert, quantize, compare, and smoke tests of a server."""

"""These tools inspect, check, convert, quantize and compare model files, and check a running server from outside."""

"""This package finds model files, checks their headers, and reads and writes their tensors."""

"""Honest measurements: the same work for everybody, the machine's limits beside the result."""

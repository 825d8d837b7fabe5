"""Requests, parameters, results, configuration, errors: plain data, no torch."""

"""Benchmarks of the control path and the data path; each one measures its baseline in the same
run. docs/benchmarks.md says how.
"""

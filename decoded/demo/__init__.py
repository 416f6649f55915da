"""The main job on one machine: real requests and virtual ones, from submit to their outcome.

`python -m decoded.demo` starts a daemon, a P process and a D engine. Of its modules,
`scenario` has the batch, `prefill`, `engine` and `reference` are the processes, `run`
conducts them and `verify` says whether all is as it should be.
"""

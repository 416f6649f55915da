"""A prefill/decode cluster of real vLLM engines on one machine, and its acceptance.

`scripts/cluster` is the command; it runs in an environment with vLLM (`setup_vllm` in
scripts/_setup).
"""

"""The front of a P/D cluster: one OpenAI-compatible address before its D and P engines."""

"""The acceptance: what a P/D cluster answers, held against one engine that stands alone."""

"""`decoded`: the decode-node daemon of a prefill/decode cluster."""

__version__ = "0.1.0"

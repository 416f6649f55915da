"""What can go wrong on the P side, by whose fault it is."""

from __future__ import annotations


class ProducerError(Exception):
    """Base of the errors of this package; the text is fit for a log or an HTTP answer."""


class ParamsError(ProducerError, ValueError):
    """D's parameters for a request are unusable."""


class HandshakeError(ProducerError):
    """No metadata. `answered`: D did answer, with an error or with something unreadable."""

    def __init__(self, message: str, answered: bool = False) -> None:
        super().__init__(message)
        self.answered = answered


class PlanError(ProducerError, ValueError):
    """P's and D's memory do not fit together; the text names what differs."""


class PushError(ProducerError):
    """The caller asked for something that a push cannot do."""

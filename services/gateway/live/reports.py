"""Where the gateway writes down what it routed and delivered."""

from typing import Protocol

from evenflow.tracker.v1 import tracker_pb2 as pb
from services.reporting.ledger import RequestRef


class DeliveryReports(Protocol):
    """`services.reporting.reporter.TrackerReporter`, as far as the gateway uses it.

    Calls neither block nor fail, whether or not a tracker is there.
    """

    def register(self, registration: pb.Registration) -> None: ...

    def update(
        self, ref: RequestRef, *, num_delivered: int | None = None, final: bool = False
    ) -> None: ...


class NoReports:
    """For a gateway without a tracker."""

    def register(self, registration: pb.Registration) -> None:
        """Do nothing."""

    def update(
        self, ref: RequestRef, *, num_delivered: int | None = None, final: bool = False
    ) -> None:
        """Do nothing."""

"""What is carried in time: TurboConn, T²MLR and soft tokens, as plain modules with one contract."""

from collections.abc import Mapping

from undertow.pathways.base import Pathway, Recurrence, check_layer
from undertow.pathways.soft_token import SoftToken
from undertow.pathways.t2mlr import T2MLR
from undertow.pathways.turboconn import TurboConn
from undertow.registry import kinds

RECURRENCES: Mapping[str, type[Recurrence]] = kinds(Recurrence)
"""Every registered recurrence in time by its kind."""

__all__ = ["RECURRENCES", "T2MLR", "Pathway", "Recurrence", "SoftToken", "TurboConn", "check_layer"]

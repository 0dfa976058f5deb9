"""What is carried in time: TurboConn, T²MLR and soft tokens, as plain modules with one contract."""

from undertow.pathways.base import Pathway, Recurrence
from undertow.pathways.soft_token import SoftToken
from undertow.pathways.t2mlr import T2MLR
from undertow.pathways.turboconn import TurboConn

RECURRENCES: dict[str, type[Recurrence]] = {cls.kind: cls for cls in (TurboConn, T2MLR, SoftToken)}

__all__ = ["RECURRENCES", "T2MLR", "Pathway", "Recurrence", "SoftToken", "TurboConn"]

"""The shape doctor: which tensor of a call is wrong, how to mend it, a test that keeps it so."""

from .diagnosis import Diagnosis, diagnose

__all__ = ["Diagnosis", "diagnose"]

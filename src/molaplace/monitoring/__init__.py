"""Watching a deployed model: alarms that may be read at any time, expected accuracy without labels, and accuracy from late labels."""

from molaplace.monitoring.accuracy import ExpectedAccuracy
from molaplace.monitoring.alarm import Alarm, Contribution
from molaplace.monitoring.labelled import LabelledAccuracy, RecentAccuracy

__all__ = ["Alarm", "Contribution", "ExpectedAccuracy", "LabelledAccuracy", "RecentAccuracy"]

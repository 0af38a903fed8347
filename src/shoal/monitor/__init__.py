"""What a run tells about itself: event files, sinks, the summary. Observes only; no torch."""

from shoal.monitor.events import EventLog, cut_back, read_events
from shoal.monitor.sinks import Sink, Sinks, load_sinks
from shoal.monitor.summary import RunTotals, summary

__all__ = ["EventLog", "RunTotals", "Sink", "Sinks", "cut_back", "load_sinks", "read_events", "summary"]

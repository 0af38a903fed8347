"""Errors, units, settings and event rows: plain values that every layer may use."""

"""Replay of request traces."""

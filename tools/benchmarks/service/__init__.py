"""Serves the compared views with a real server."""

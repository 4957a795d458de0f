"""Measures the cost of protection: ``python -m tools.benchmarks``.

``docs/explanation/costs.md`` shows and explains the figures. ``tests/test_benchmarks.py`` checks that it runs.
"""
